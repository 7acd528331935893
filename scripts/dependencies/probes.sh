# shellcheck shell=bash disable=SC2086,SC2154    # flags are lists of words; they and what probes are made of: parts.sh
# One probe for each part of parts.sh: probe_PART succeeds if the part works here, and answers with make variables.

probe_cxx() {
  command -v $CXX >/dev/null || { absent "no program $CXX"; return; }
  if ! build try "$CXX" $flags ${LDFLAGS:-} -ldl <<'CPP'
#include <omp.h>
#include <bit>
#include <source_location>
#include <span>
#include <thread>
static_assert(std::bit_cast<unsigned>(1.0f) == 0x3f800000);  // from g++ 11 on
template <typename T> concept Number = requires(T a) { a + a; };
template <Number T> T sum(std::span<const T> values) {
  T total = 0;
#pragma omp parallel for reduction(+ : total)
  for (int i = 0; i < int(values.size()); ++i) total += values[i];
  return total;
}
int main() {
  const int values[] = {1, 2, 3};
  std::thread([] {}).join();
  return sum<int>(values) != 6 || omp_get_max_threads() < 1;
}
CPP
  then
    unusable "'$CXX $flags${LDFLAGS:+ $LDFLAGS}' builds no C++20 with OpenMP: $(first_error "$dir/try.log")"
  elif ! "$dir/try" >"$dir/run.log" 2>&1; then
    unusable "what '$CXX $flags${LDFLAGS:+ $LDFLAGS}' builds does not run: $(first_error "$dir/run.log")"
  else
    answer VERSION "$($CXX --version | sed -n 1p)"
  fi
}

probe_cli11() {
  headers CLI/CLI.hpp CLI11_VERSION <<'CPP'
#include <CLI/CLI.hpp>
int main(int argc, char** argv) {
  CLI::App app;
  app.add_flag("--flag")->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.parse(argc, argv);
}
CPP
}

probe_json() {
  headers nlohmann/json.hpp NLOHMANN_JSON_VERSION_MAJOR.NLOHMANN_JSON_VERSION_MINOR.NLOHMANN_JSON_VERSION_PATCH <<'CPP'
#include <nlohmann/json.hpp>
int main() { return nlohmann::json::parse("[1]").size() != 1; }
CPP
}

probe_xxhash() {
  library xxhash.h -lxxhash <<'CPP'
#include <cstdio>
#include <xxhash.h>
int main() {
  XXH3_state_t* state = XXH3_createState();
  if (XXH3_64bits_reset(state) != XXH_OK || XXH3_64bits_update(state, "abc", 3) != XXH_OK) return 1;
  const bool same = XXH3_64bits_digest(state) == XXH3_64bits("abc", 3);
  XXH3_freeState(state);
  std::printf("%d.%d.%d\n", XXH_VERSION_MAJOR, XXH_VERSION_MINOR, XXH_VERSION_RELEASE);
  return !same || XXH_versionNumber() < 800;
}
CPP
}

# Part of OpenSSL: authenticates the processes of a job.
probe_libcrypto() {
  library openssl/hmac.h -lcrypto <<'CPP'
#include <cstdio>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
int main() {
  unsigned char key[32], mac[EVP_MAX_MD_SIZE];
  unsigned int bytes = 0;
  if (OpenSSL_version_num() >> 28 != OPENSSL_VERSION_NUMBER >> 28) {
    std::printf("the headers are version %lx, the library %lx\n", OPENSSL_VERSION_NUMBER >> 28, OpenSSL_version_num() >> 28);
    return 1;
  }
  if (RAND_bytes(key, sizeof key) != 1) return 1;
  if (HMAC(EVP_sha256(), key, sizeof key, key, sizeof key, mac, &bytes) == nullptr || bytes != 32) return 1;
  char version[64];
  if (std::sscanf(OpenSSL_version(OPENSSL_VERSION), "%*s %63s", version) != 1) return 1;
  std::printf("%s\n", version);
}
CPP
}

# Reads gzip's files.
probe_zlib() {
  library zlib.h -lz <<'CPP'
#include <cstdio>
#include <zlib.h>
int main() {
  unsigned char packed[64], text[3];
  uLongf packed_bytes = sizeof packed, bytes = sizeof text;
  if (compress(packed, &packed_bytes, reinterpret_cast<const unsigned char*>("abc"), 3) != Z_OK) return 1;
  if (uncompress(text, &bytes, packed, packed_bytes) != Z_OK || bytes != 3) return 1;
  std::printf("%s\n", zlibVersion());
  return zlibVersion()[0] != ZLIB_VERSION[0];
}
CPP
}

# Reads zstd's files.
probe_zstd() {
  library zstd.h -lzstd <<'CPP'
#include <cstdio>
#include <zstd.h>
int main() {
  char packed[64], text[3];
  const size_t packed_bytes = ZSTD_compress(packed, sizeof packed, "abc", 3, 1);
  if (ZSTD_isError(packed_bytes) || ZSTD_decompress(text, sizeof text, packed, packed_bytes) != 3) return 1;
  std::printf("%s\n", ZSTD_versionString());
  return ZSTD_versionNumber() < 10400;
}
CPP
}

# Used as headers alone.
probe_tomlplusplus() {
  headers toml++/toml.h TOML_LIB_MAJOR.TOML_LIB_MINOR.TOML_LIB_PATCH <<'CPP'
#include <toml++/toml.h>
int main() { return toml::parse("a = 1")["a"].value<int>() != 1; }
CPP
}

# The framework of the tests: version 3 is a library, version 2 only headers. test/catch2.h uses version 3 if it finds
# its header.
probe_catch2() {
  local version
  if includes "$CXX $flags" catch2/catch_all.hpp; then
    if library catch2/catch_all.hpp -lCatch2 <<'CPP'
#include <catch2/catch_version.hpp>
#include <catch2/catch_version_macros.hpp>
#include <iostream>
int main() {
  const auto& library = Catch::libraryVersion();
  if (library.majorVersion != CATCH_VERSION_MAJOR || library.minorVersion != CATCH_VERSION_MINOR) {
    std::cout << "the headers are version " << CATCH_VERSION_MAJOR << '.' << CATCH_VERSION_MINOR << ", the library "
              << library << std::endl;
    return 1;
  }
  std::cout << library << std::endl;
}
CPP
    then answer LIBS -lCatch2; else return 1; fi
    return
  fi
  version=$(header_version "$CXX $flags" catch2/catch.hpp \
    CATCH_VERSION_MAJOR.CATCH_VERSION_MINOR.CATCH_VERSION_PATCH)
  if [ -n "$version" ] && ! at_least "$version" 2.13; then
    unusable "version $version was found$(where_is catch2/catch.hpp), and the tests need 2.13 or newer"
    return
  fi
  headers catch2/catch.hpp CATCH_VERSION_MAJOR.CATCH_VERSION_MINOR.CATCH_VERSION_PATCH <<'CPP'
#include <catch2/catch.hpp>
TEST_CASE("a") { REQUIRE(GENERATE(1, 2) != 3); }
CPP
}

# where_is HEADER: " in FOLDER/HEADER"
where_is() {
  echo "#include <$1>" | $CXX $flags -x c++ -E - 2>/dev/null | sed -n "s|^# 1 \"\(.*/$1\)\".*| in \1|p" | sed -n 1p
}

# The tests of CUDA kernels run the kernels' threads as fibers. (1.74 is 107400.)
probe_boost() {
  library boost/context/detail/fcontext.hpp -lboost_context <<'CPP'
#include <boost/context/detail/fcontext.hpp>
#include <boost/version.hpp>
#include <cstdio>
using namespace boost::context::detail;
static char stack[1 << 16];
static void fiber(transfer_t from) { jump_fcontext(from.fctx, from.data); }
int main() {
  int value;
  const transfer_t back = jump_fcontext(make_fcontext(stack + sizeof(stack), sizeof(stack), fiber), &value);
  std::printf("%d.%d\n", BOOST_VERSION / 100000, BOOST_VERSION / 100 % 1000);
  return back.data != &value;
}
CPP
}

# sanitizer OPTION
sanitizer() {
  if build try "$CXX" $flags "$1" ${LDFLAGS:-} <<<'int main() {}'; then answer VERSION "$1"; return; fi
  has_compiler || return
  unusable "'$CXX $flags $1' does not link: $(first_error "$dir/try.log")"
}
probe_asan() { sanitizer -fsanitize=address,undefined; }
probe_tsan() { sanitizer -fsanitize=thread; }

# Checks for the modules that data/, scripts/ and the tests import: python3-minimal has only a bare interpreter.
probe_python() {
  tool python3 -c 'import argparse, array, concurrent.futures, http.server, json, multiprocessing, platform, struct
import tempfile, unicodedata, urllib.request
print(platform.python_version())'
}

probe_matplotlib() {
  local python
  python=$(scripts/find_python.sh matplotlib) || { absent "no Python here has matplotlib"; return; }
  MPLBACKEND=Agg tool "$python" -c 'import matplotlib, matplotlib.pyplot; print(matplotlib.__version__)'
}

# The program and its text are separate packages.
probe_bible() {
  if ! command -v bible >/dev/null; then
    absent "no program bible"
  elif ! grep -q 'In the beginning' <<<"$(bible -l 1000 gen1:1 2>&1)"; then
    unusable "$(command -v bible) is there, but 'bible gen1:1' does not print the verse"
  fi
}

probe_clang_format() { tool clang-format --version; }
probe_shellcheck() { tool shellcheck --version; }
probe_debootstrap() { tool debootstrap --version; }
probe_arm_cxx() {
  command -v aarch64-linux-gnu-g++ >/dev/null || { absent 'no program aarch64-linux-gnu-g++'; return; }
  build try 'aarch64-linux-gnu-g++ -std=c++20 -fopenmp' <<'CPP' ||
#include <omp.h>
#include <span>
int main() { return omp_get_max_threads() < 1; }
CPP
    unusable "aarch64-linux-gnu-g++ builds no C++20 with OpenMP: $(first_error "$dir/try.log")"
}
probe_qemu() { tool qemu-aarch64 --version; }
probe_chromium() { tool chromium --version; }
probe_slurmctld() { tool slurmctld -V; }
probe_slurmd() { tool slurmd -V; }
# Slurm's commands do not start without a configuration.
probe_slurm_client() {
  printf '%s\n' ClusterName=probe SlurmctldHost=localhost NodeName=localhost >"$dir/slurm.conf"
  tool env SLURM_CONF="$dir/slurm.conf" srun -V
}
probe_munge() { tool munged --version; }
probe_ip() { tool ip -V; }

# NVIDIA's compiler must accept the host compiler. 12.4 ends with internal errors ("il.c").
probe_nvcc() {
  local version
  command -v "$NVCC" >/dev/null || { absent "no program $NVCC"; return; }
  version=$("$NVCC" --version 2>&1 | sed -n 's/.*, V\([0-9.]*\)$/\1/p')
  if [[ $version =~ ^([0-9]+)\.([0-9]+) ]] && ((BASH_REMATCH[1] * 100 + BASH_REMATCH[2] < 1205)); then
    unusable "$(command -v "$NVCC") is there, but of CUDA $version, and cannot compile this program: use CUDA 13, or at least 12.5"
  elif suffix=cu build try "$nvcc" "${nvcc_host[@]}" <<'CUDA'
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <span>
__global__ void kernel(std::span<__nv_bfloat16> out) { out[threadIdx.x] = __float2bfloat16(1.0f); }
int main() { return cudaGetLastError(); }
CUDA
  then
    answer VERSION "$version"
  else
    unusable "$(command -v "$NVCC") is there, but builds no C++20 with ${CXX##* }: $(first_error "$dir/try.log")"
  fi
}

# nvidia_library HEADER LIBRARIES STATEMENT VERSION [FLAGS...]: only nvcc knows where to find these
nvidia_library() {
  local header=$1 libraries=$2 statement=$3 version=$4 with_header=no
  shift 4
  if build try "$nvcc -x c++" "${nvcc_host[@]}" "$@" $libraries <<<"#include <$header>"$'\n'"int main() { $statement; }"; then
    answer VERSION "$(header_version "$nvcc -x c++ $*" "$header" "$version")"
    return
  fi
  ! includes "$nvcc" "$header" "$@" || with_header=yes
  if build link "$nvcc -x c++" "$@" $libraries <<<'int main() {}'; then
    if [ $with_header = no ]; then unusable "$libraries is there, but $header is not"; else
      unusable "$header and $libraries are there, but do not fit together: $(first_error "$dir/try.log")"
    fi
  elif [ $with_header = yes ]; then
    unusable "$header is there, but $libraries is not: $(first_error "$dir/link.log")"
  else
    absent "neither $header nor $libraries"
  fi
}
probe_cublaslt() {
  nvidia_library cublasLt.h -lcublasLt 'return cublasLtGetVersion() == 0' \
    CUBLAS_VER_MAJOR.CUBLAS_VER_MINOR.CUBLAS_VER_PATCH
}
probe_nccl() {
  nvidia_library nccl.h -lnccl 'int version; return ncclGetVersion(&version)' NCCL_MAJOR.NCCL_MINOR.NCCL_PATCH
}

# Attention by cuDNN. Its wheels have no libcudnn.so, only libcudnn.so.9; -I, because nvcc looks into the toolkit before
# any -isystem, and some toolkits have a cuDNN. cudnn-frontend is headers alone, which call NVIDIA's run-time compiler.
cudnn_flags="${CUDNN_HOME:+-I$CUDNN_HOME/include} ${CUDNN_FRONTEND_HOME:+-isystem $CUDNN_FRONTEND_HOME/include}"
probe_cudnn() {
  local libraries='-l:libcudnn.so.9 -lnvrtc' folder
  for folder in ${CUDNN_HOME:+"$CUDNN_HOME/lib" "$CUDNN_HOME/lib64"}; do
    [ ! -e "$folder/libcudnn.so.9" ] || libraries="-L$folder -Xlinker -rpath=$folder $libraries"
  done
  nvidia_library cudnn.h "$libraries" 'return cudnnGetVersion() == 0' CUDNN_MAJOR.CUDNN_MINOR.CUDNN_PATCHLEVEL \
    $cudnn_flags || return
  answer FLAGS "$cudnn_flags"
  answer LIBS "$libraries"
}
probe_cudnn_frontend() {
  local version
  version=$(header_version "$nvcc -x c++ $cudnn_flags" cudnn_frontend_version.h \
    CUDNN_FRONTEND_MAJOR_VERSION.CUDNN_FRONTEND_MINOR_VERSION.CUDNN_FRONTEND_PATCH_VERSION)
  if [ -n "$version" ]; then answer VERSION "$version"; else absent "no cudnn_frontend_version.h"; fi
}

# A GPU that answers. With a driver but no GPU, nvidia-smi fails.
probe_gpu() {
  local gpus
  gpus=$(nvidia-smi -L 2>/dev/null) || gpus=
  [ -n "$gpus" ] || { absent "no GPU answers nvidia-smi"; return; }
  echo "GPU := $(sed -n '1s/^GPU 0: \(.*\) (UUID.*$/\1/p' <<<"$gpus")"
  answer ARCH "sm_$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | sed -n 1p | tr -d .)"
}

# Sets mpi_flags and mpi_libs for MPI's C interface, from the compiler wrapper or pkg-config; without either it may be
# where the compiler looks, or in CPPFLAGS and LDFLAGS. Uses the wrapper for C: the one for C++ adds MPI's old C++
# bindings. Keeps only what both g++ and nvcc take: "-Wl,-rpath,/opt" becomes "-Xlinker -rpath -Xlinker /opt".
find_mpi_flags() {
  local said word previous=
  said=$($MPICC -show 2>/dev/null | cut -d ' ' -s -f 2-) || said=
  [ -n "$said" ] || said=$(pkg-config --cflags --libs mpi-c 2>/dev/null || pkg-config --cflags --libs mpich 2>/dev/null) ||
    said=-lmpi
  mpi_flags='-DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX' mpi_libs=
  for word in $said; do
    case $previous:$word in
      -isystem:*) mpi_flags+=" -isystem $word" ;;
      *:-I?* | *:-D?*) mpi_flags+=" $word" ;;
      *:-Wl,*) word=${word#-Wl,}; mpi_libs+=" -Xlinker ${word//,/ -Xlinker }" ;;
      *:-L?* | *:-l?*) mpi_libs+=" $word" ;;
    esac
    previous=$word
  done
  mpi_libs=${mpi_libs# }
}

# Its version is the library's: "Open MPI 4.1.4", "MPICH 4.0.2".
probe_mpi() {
  local version mpi_flags mpi_libs
  find_mpi_flags
  if ! build try "$CXX" $flags $mpi_flags ${LDFLAGS:-} $mpi_libs <<'CPP'
#include <cstdio>
#include <mpi.h>
int main(int argc, char** argv) {
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length, level;
  if (argc > 1) MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  MPI_Get_library_version(version, &length);
  std::printf("%s\n", version);
}
CPP
  then
    has_compiler || return
    if includes "$CXX $flags $mpi_flags" mpi.h; then
      unusable "mpi.h is there, but no program builds with it: $(first_error "$dir/try.log")"
    elif command -v ${MPICC%% *} >/dev/null; then
      unusable "$(command -v ${MPICC%% *}) is there, but mpi.h is not"
    else
      absent "neither $MPICC nor mpi.h"
    fi
  elif ! version=$("$dir/try" 2>"$dir/run.log"); then
    unusable "mpi.h and its library are there, but a program with them fails: $(first_error "$dir/run.log")"
  else
    answer VERSION "$(head -n 1 <<<"$version" | sed -E 's/,.*//; s/ v([0-9])/ \1/; s/ Version:/ /; s/[[:space:]]+/ /g')"
    answer FLAGS "$mpi_flags"
    answer LIBS "$mpi_libs"
  fi
}

# Checks that mpirun belongs to this MPI: another's starts every process as the only one of its job.
probe_mpirun() {
  local mpi_flags mpi_libs program=${MPIRUN:-mpirun}
  command -v ${program%% *} >/dev/null || { absent "no program $program"; return; }
  find_mpi_flags
  if ! build try "$CXX" $flags $mpi_flags ${LDFLAGS:-} $mpi_libs <<'CPP'
#include <cstdio>
#include <mpi.h>
int main(int argc, char** argv) {
  int level, rank, processes;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &processes);
  int other = -1;
  if (processes == 2)
    MPI_Sendrecv(&rank, 1, MPI_INT, 1 - rank, 0, &other, 1, MPI_INT, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  if (processes != 2) std::printf("a process sees %d process(es), expected 2\n", processes);
  MPI_Finalize();
  return processes == 2 ? other != 1 - rank : 3;
}
CPP
  then
    absent "there is no MPI to build programs with"
  elif timeout 60 scripts/multi_node/local_mpirun.sh -n 2 "$dir/try" >"$dir/run.log" 2>&1; then
    answer VERSION "$($program --version 2>&1 | grep -oE '[0-9]+(\.[0-9]+)+' | sed -n 1p)"
  elif grep -q 'a process sees 1 process' "$dir/run.log"; then
    unusable "$(command -v ${program%% *}) is of another MPI than $MPICC: its processes do not see each other"
  else
    unusable "$(command -v ${program%% *}) is there, but two processes fail: $(first_error "$dir/run.log")"
  fi
}
