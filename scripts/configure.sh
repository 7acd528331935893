#!/usr/bin/env bash
# Asks this machine what it has, by linking against it, and prints the answers as make variables for build/config.mk:
# a version where the part is there, nothing where it is not. Only a missing REQUIRED part is an error.
#
#   CXX=g++ NVCC=nvcc CPPFLAGS= CXXFLAGS= LDFLAGS= CUDNN_HOME= CUDNN_FRONTEND_HOME= scripts/configure.sh \
#     >build/config.mk
# shellcheck disable=SC2086    # compilers and flags are lists of words throughout
set -euo pipefail
cd "$(dirname "$0")/.."

CXX=${CXX:-g++}
MPICXX=${MPICXX:-mpicxx}
NVCC="${NVCC:-nvcc} -ccbin ${CXX##* }"   # the compiler itself, where CXX is "ccache g++"
flags="-std=c++20 -fopenmp ${CPPFLAGS:-} ${CXXFLAGS:-} ${LDFLAGS:-}"
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

answer() { echo "$1 := ${2:-}"; }

missing() {
  echo "configure: $1 was not found; 'make deps' installs what is missing" >&2
  exit 1
}

# links COMPILER HEADER STATEMENT FLAGS...: does a program of this statement compile and link?
links() {
  local compiler=$1 header=$2 statement=$3
  shift 3
  printf '#include <%s>\nint main() { %s; }\n' "$header" "$statement" >"$dir/try.cpp"
  $compiler "$dir/try.cpp" -o "$dir/try" "$@" >/dev/null 2>&1
}

# version COMPILER HEADER EXPRESSION: what the header's macros make of the expression; nothing if there is no such header
version() {
  printf '#include <%s>\n#define TEXT_(x) #x\n#define TEXT(x) TEXT_(x)\nTEXT(%s)\n' "$2" "$3" >"$dir/version.cpp"
  { $1 -E "$dir/version.cpp" 2>/dev/null || true; } | tail -n 1 | tr -d '\\" ' | sed -n '/^[0-9][0-9.]*$/p'
}

echo "# Written by scripts/configure.sh: what this machine has. 'make reconfigure' asks again."

# Required.
links "$CXX" omp.h 'return omp_get_max_threads() < 1' $flags ||
  missing "a C++20 compiler with OpenMP (tried: $CXX $flags)"
answer CXX_VERSION "$($CXX --version | head -n 1)"
cli11=$(version "$CXX $flags" CLI/CLI.hpp CLI11_VERSION)
[ -n "$cli11" ] || missing 'CLI11 (CLI/CLI.hpp)'
answer CLI11_VERSION "$cli11"
json=$(version "$CXX $flags" nlohmann/json.hpp \
  NLOHMANN_JSON_VERSION_MAJOR.NLOHMANN_JSON_VERSION_MINOR.NLOHMANN_JSON_VERSION_PATCH)
[ -n "$json" ] || missing 'nlohmann/json (nlohmann/json.hpp)'
answer JSON_VERSION "$json"
links "$CXX" xxhash.h 'return XXH3_64bits("", 0) == 0' $flags -lxxhash || missing 'xxHash 0.8 (xxhash.h, -lxxhash)'
answer XXHASH_VERSION \
  "$(version "$CXX $flags" xxhash.h XXH_VERSION_MAJOR.XXH_VERSION_MINOR.XXH_VERSION_RELEASE)"

# What the tests are written in: version 3 is a library, version 2 headers alone.
catch2_header=catch2/catch.hpp
if links "$CXX" catch2/catch_version.hpp 'Catch::libraryVersion()' $flags -lCatch2; then
  catch2_header=catch2/catch_version_macros.hpp
  answer CATCH2_LIBS -lCatch2
fi
answer CATCH2_VERSION "$(version "$CXX $flags" $catch2_header \
  CATCH_VERSION_MAJOR.CATCH_VERSION_MINOR.CATCH_VERSION_PATCH)"

# The tests of CUDA kernels run them as fibers. (1.74 is 107400.)
! links "$CXX" boost/context/detail/fcontext.hpp \
  'return boost::context::detail::make_fcontext(nullptr, 0, nullptr) == nullptr' $flags -lboost_context ||
  answer BOOST_VERSION "$(version "$CXX $flags" boost/version.hpp BOOST_VERSION |
    awk '{ printf "%d.%d", $1 / 100000, $1 / 100 % 1000 }')"

# Optional: the CPU's matmul, and processes that talk to each other (its version is that of the MPI standard).
! links "$CXX" dnnl.h 'return dnnl_version() == nullptr' $flags -ldnnl ||
  answer ONEDNN_VERSION "$(version "$CXX $flags" dnnl.h DNNL_VERSION_MAJOR.DNNL_VERSION_MINOR.DNNL_VERSION_PATCH)"
! links "$MPICXX" mpi.h 'return MPI_Init(nullptr, nullptr)' $flags ||
  answer MPI_VERSION "$(version "$MPICXX $flags" mpi.h MPI_VERSION.MPI_SUBVERSION)"

# Optional: NVIDIA's compiler and libraries, whose headers only nvcc knows where to find.
echo '__global__ void kernel() {} int main() { return 0; }' >"$dir/try.cu"
if $NVCC -std=c++20 "$dir/try.cu" -o "$dir/try" >/dev/null 2>&1; then
  answer NVCC_VERSION "$($NVCC --version | sed -n 's/.*, V\([0-9.]*\)$/\1/p')"
  ! links "$NVCC -x c++" cublasLt.h 'return cublasLtGetVersion() == 0' -lcublasLt ||
    answer CUBLASLT_VERSION "$(version "$NVCC -x c++" cublasLt.h CUBLAS_VER_MAJOR.CUBLAS_VER_MINOR.CUBLAS_VER_PATCH)"
  ! links "$NVCC -x c++" nccl.h 'int version; return ncclGetVersion(&version)' -lnccl ||
    answer NCCL_VERSION "$(version "$NVCC -x c++" nccl.h NCCL_MAJOR.NCCL_MINOR.NCCL_PATCH)"

  # Attention by cuDNN. Its wheels have no libcudnn.so, only libcudnn.so.9; -I, because nvcc looks into the toolkit before
  # any -isystem, and some toolkits have a cuDNN. cudnn-frontend is headers alone, which call NVIDIA's run-time compiler.
  cudnn_flags="${CUDNN_HOME:+-I$CUDNN_HOME/include} ${CUDNN_FRONTEND_HOME:+-isystem $CUDNN_FRONTEND_HOME/include}"
  cudnn_libs='-l:libcudnn.so.9 -lnvrtc'
  for lib in ${CUDNN_HOME:+"$CUDNN_HOME/lib" "$CUDNN_HOME/lib64"}; do
    [ ! -e "$lib/libcudnn.so.9" ] || cudnn_libs="-L$lib -Xlinker -rpath=$lib $cudnn_libs"
  done
  if links "$NVCC -x c++ $cudnn_flags" cudnn.h 'return cudnnGetVersion() == 0' $cudnn_libs; then
    answer CUDNN_VERSION "$(version "$NVCC -x c++ $cudnn_flags" cudnn.h CUDNN_MAJOR.CUDNN_MINOR.CUDNN_PATCHLEVEL)"
    answer CUDNN_FLAGS "$cudnn_flags"
    answer CUDNN_LIBS "$cudnn_libs"
  fi
  answer CUDNN_FRONTEND_VERSION "$(version "$NVCC -x c++ $cudnn_flags" cudnn_frontend_version.h \
    CUDNN_FRONTEND_MAJOR_VERSION.CUDNN_FRONTEND_MINOR_VERSION.CUDNN_FRONTEND_PATCH_VERSION)"
fi

# Optional: a GPU that answers. (Where there is a driver alone, nvidia-smi fails.)
if gpus=$(nvidia-smi -L 2>/dev/null) && [ -n "$gpus" ]; then
  answer GPU "$(sed -n '1s/^GPU 0: \(.*\) (UUID.*$/\1/p' <<<"$gpus")"
  answer GPU_ARCH "sm_$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)"
fi
