# The build of train_gpt. `make help` prints the lines of this file that begin with two hashes.
#
## make [TARGET...] [VARIABLE=value...]
##
## Targets
##   train_gpt    build the trainer; the default (also called all)
##   run          from nothing to a trained model: install dependencies, build, prepare a book, train on it, plot
##   test         install dependencies, build, run the tests, and compile with every compiler found
##   test-long    the same plus the long tests: cases tagged [long], test/scripts/long_*, ThreadSanitizer
##   test-faults  kills, failing disks, damaged checkpoints, cut networks, lost ranks;
##                three minutes, counts in dev/results/faults.md. `make test` has a few of each
##   test-fresh   `make run` and `make test` on bare Debian roots; as root, takes an hour, the network and 2 GB
##   check        floors, headers, formatting, shell and Python scripts
##   bench        compare training steps with PyTorch; BENCH_FLAGS are options of dev/bench/compare.py
##   bench-checkpoint   what saving costs a run: async, sync, and PyTorch's async_save; SMALL=1: minutes
##   bench-dist   tokens/s of one rank and of two, as threads, by MPI and TCP; a pipeline beside data parallelism; the
##                ring beside MPI's collectives
##   bench-cuda   on a GPU: each op of a training step against the roofline, and training steps against PyTorch
##   comm-bench   build build/comm_bench, which times the collectives like nccl-tests, and what dev/comm/beside_mpi.sh runs
##   tests        build what `make test` runs, without running it
##   test-cuda    run the CUDA tests on a GPU; `make test` runs them on the CPU
##   ladders      build build/ladders, which times the versions of the kernels in dev/cuda/ on a GPU
##   cpu-ladder   build build/cpu_ladder, which times the steps of a product in dev/cpu/ on this processor
##   smoke        compile train_gpt.cu with g++ and, if found, with nvcc
##   check-archs  compile all CUDA kernels with nvcc for sm_80, sm_90 and sm_100; takes minutes
##   config       show what was found on this machine, what the build uses, and what does not work and why
##   reconfigure  look again at this machine
##   deps         install all missing dependencies, optional ones too (Debian packages)
##   format       format all C++ sources in place
##   clean        remove build products
##
## Variables and their defaults
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DEFAULT_GOAL := train_gpt
.DELETE_ON_ERROR:

# The outer targets install what is missing and then start make again, so that it looks at the machine only after the
# installation. They need no knowledge of the machine; all other targets do.
OUTER_TARGETS := help run test test-long test-faults test-fresh check bench bench-checkpoint bench-dist bench-cuda reconfigure deps format clean
INNER_TARGETS := all tests test-runs test-sum test-cuda ladders cpu-ladder smoke smoke-other check-archs config \
                 check-floors check-headers check-format check-shell check-python check-sum format-sources
.PHONY: $(OUTER_TARGETS) $(INNER_TARGETS)
ifneq ($(filter-out $(OUTER_TARGETS),$(or $(MAKECMDGOALS),train_gpt)),)
include build/config.mk
endif

##   DEVICE=cpu|cuda            default: cuda if nvcc, cuBLASLt and a GPU are found; a cuda build also runs on CPUs
DEVICE ?= $(if $(and $(NVCC_VERSION),$(CUBLASLT_VERSION),$(GPU)),cuda,cpu)
##   ARCH_FLAGS=                the processors that all but the CPU's ops are compiled for; default: any. The ops are
##                              compiled for several instruction sets, of which a run takes the best that is there
##   ARCH=sm_90                 the GPUs that it will run on; default: the architecture of the GPU found, else sm_90,
##                              which is Hopper alone; a program for another one also runs on newer GPUs
ARCH ?= $(or $(GPU_ARCH),sm_90)
##   CXX=g++                    the C++ compiler, also nvcc's host compiler
ifeq ($(origin CXX),default)
CXX := g++
endif
##   USE_CUDNN=0|1              1: also build cuDNN's attention, for --attention cudnn
USE_CUDNN ?= 0
##   CUDNN_HOME=, CUDNN_FRONTEND_HOME=   prefixes of cuDNN and of cudnn-frontend's headers, if not in the usual places
##   NCCL_VERSION=              empty: build without NCCL even if it is found
##   MPI_VERSION=               the same for MPI
##   MPICC=mpicc, MPIRUN=mpirun   MPI's compiler wrapper, which is asked for flags, and its launcher
##   NVCC=nvcc                  NVIDIA's compiler
NVCC ?= $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc),nvcc)
##   CPPFLAGS, CXXFLAGS, LDFLAGS, NVCCFLAGS   appended last, so they override: CXXFLAGS='-O1 -g'
##   JOBS=N                     parallel jobs; default: the number of processors
JOBS ?= $(shell nproc)
##   TESTS=                     run only these test cases, in Catch2's syntax: TESTS='[ops]', TESTS='a resumed run*'
##   BENCH_FLAGS=, OP_TABLE_FLAGS=   options for dev/bench/compare.py and for build/op_table
##   RUN_FLAGS=                 trainer options that `make run` adds to its own
##   TEST_TIMEOUT=45m           a test program that takes longer is killed and counts as failed; test-long: 2h
TEST_TIMEOUT ?= $(if $(LONG),2h,45m)
export CUDNN_HOME CUDNN_FRONTEND_HOME CXX NVCC MPICC MPIRUN CPPFLAGS CXXFLAGS LDFLAGS NVCCFLAGS TESTS TEST_TIMEOUT
unexport CDPATH
# A Turkish i has no I as its capital, and a German number no point.
export LC_ALL := C

comma := ,
CUDA := $(filter cuda,$(DEVICE))
CUDNN := $(filter 1,$(USE_CUDNN))
ifeq ($(filter cpu cuda,$(DEVICE)),)
$(error DEVICE=$(DEVICE) is unknown: use cpu or cuda)
endif
ifeq ($(filter 0 1,$(USE_CUDNN)),)
$(error USE_CUDNN=$(USE_CUDNN) is unknown: use 0 or 1)
endif
# The question that build/config.mk answers. If it has changed, make looks at the machine again. The time is that of the
# last change to Debian's packages; the devices are GPUs.
QUESTION = $(strip $(CXX) $(CPPFLAGS) $(CXXFLAGS) $(LDFLAGS) $(shell $(CXX) --version 2>&1 | head -n 1) \
                   $(NVCC) $(NVCCFLAGS) $(shell $(NVCC) --version 2>&1 | tail -n 1) '$(CUDNN_HOME)' \
                   '$(CUDNN_FRONTEND_HOME)' '$(MPICC)' '$(MPIRUN)' '$(CPATH)' '$(CPLUS_INCLUDE_PATH)' '$(LIBRARY_PATH)' \
                   '$(LD_LIBRARY_PATH)' $(shell stat -c %Y /var/lib/dpkg/status 2>&-) \
                   $(wildcard /dev/nvidia[0-9]*))
ifdef CXX_VERSION   # build/config.mk was read
ifeq ($(QUESTION),$(file <build/config.question))
ifneq ($(and $(CUDA),$(if $(NVCC_VERSION),,without nvcc)),)
$(error DEVICE=cuda needs an nvcc that compiles this program ($(NVCC_FAULT)): set NVCC=/path/to/nvcc, or DEVICE=cpu)
endif
ifneq ($(and $(CUDA),$(if $(CUBLASLT_VERSION),,without cuBLASLt)),)
$(error DEVICE=cuda needs cuBLASLt, cublasLt.h and -lcublasLt, which come with the CUDA toolkit: install it, or DEVICE=cpu)
endif
ifneq ($(and $(filter tests test-runs,$(MAKECMDGOALS)),$(if $(and $(CATCH2_VERSION),$(BOOST_VERSION),$(ASAN_VERSION)),,without)),)
$(error the tests need Catch2 ($(or $(CATCH2_VERSION:%=found),$(CATCH2_FAULT),not found)), Boost.Context \
  ($(or $(BOOST_VERSION:%=found),$(BOOST_FAULT),not found)) and AddressSanitizer \
  ($(or $(ASAN_VERSION:%=found),$(ASAN_FAULT),not found)): `make deps` installs what is missing)
endif
ifneq ($(and $(CUDNN),$(if $(CUDA),,without GPUs)),)
$(error USE_CUDNN=1 is for GPUs, and this is a build for DEVICE=$(DEVICE): add DEVICE=cuda, or leave USE_CUDNN=1 out)
endif
ifneq ($(and $(CUDNN),$(if $(and $(CUDNN_VERSION),$(CUDNN_FRONTEND_VERSION)),,without cuDNN)),)
$(error USE_CUDNN=1 needs cuDNN 9 (cudnn.h, libcudnn.so.9), $(or $(CUDNN_VERSION:%=found),not found), and \
  cudnn-frontend (cudnn_frontend.h), $(or $(CUDNN_FRONTEND_VERSION:%=found),not found). Install NVIDIA's Debian \
  package libcudnn9-dev-cuda-13; or `pip install nvidia-cudnn-cu13` and CUDNN_HOME=SITE-PACKAGES/nvidia/cudnn. And \
  `pip install nvidia-cudnn-frontend` and CUDNN_FRONTEND_HOME=SITE-PACKAGES (Debian's libcudnn-frontend-dev is too old))
endif
endif
endif

# A rule that always runs, for a file whose time stamp tells when its text last changed: $(call text_file,TEXT). Several
# makes may run it at the same time.
NEW := new.$(shell echo $$PPID)
define text_file
$(shell mkdir -p $(@D))$(file >$@.$(NEW),$1)
$(move_if_changed)
endef
move_if_changed = @if cmp -s $@.$(NEW) $@; then rm $@.$(NEW); else mv $@.$(NEW) $@; fi
FORCE:

# ---- What this machine has: build/config.mk keeps the answers until the question changes -----------------------------

build/config.question: FORCE
	$(call text_file,$(QUESTION))

build/config.mk: Makefile scripts/configure.sh $(wildcard scripts/dependencies/*.sh) build/config.question
	@scripts/configure.sh >$@.$(NEW) && mv $@.$(NEW) $@

# $4: the fault of a part that is present but does not work
row = @printf '  %-14s %-40s %s\n' '$1' '$(or $2,-)' '$3' $(if $4,'' '$4' '')
config:
	$(call row,part,found,in this build)
	$(call row,C++ compiler,$(CXX_VERSION),$(if $(CUDA),called by nvcc,the trainer) and the tests)
	$(call row,CLI11,$(CLI11_VERSION),options)
	$(call row,nlohmann/json,$(JSON_VERSION),JSON files)
	$(call row,xxHash,$(XXHASH_VERSION),checksums)
	$(call row,libcrypto,$(LIBCRYPTO_VERSION),authenticated connections)
	$(call row,zlib,$(ZLIB_VERSION),texts packed by gzip)
	$(call row,Zstandard,$(ZSTD_VERSION),texts packed by zstd)
	$(call row,toml++,$(TOMLPLUSPLUS_VERSION),TOML files)
	$(call row,nvcc,$(NVCC_VERSION),$(if $(CUDA),the trainer$(comma) for $(ARCH),$(if $(NVCC_VERSION),smoke test only,-)),$(NVCC_FAULT))
	$(call row,GPU,$(GPU),$(if $(GPU),$(if $(CUDA),the trainer$(comma) tests by `make test-cuda`,not in this build),-))
	$(call row,cuBLASLt,$(CUBLASLT_VERSION),$(if $(CUBLASLT_VERSION),$(if $(CUDA),matmul on GPUs,not in this build),-),$(CUBLASLT_FAULT))
	$(call row,cuDNN,$(CUDNN_VERSION),$(if $(CUDNN),attention on GPUs,- without USE_CUDNN=1),$(CUDNN_FAULT))
	$(call row,cudnn-frontend,$(CUDNN_FRONTEND_VERSION),$(if $(CUDNN),attention on GPUs,- without USE_CUDNN=1))
	$(call row,NCCL,$(NCCL_VERSION),$(if $(NCCL_VERSION),$(if $(CUDA),collectives between GPUs,not in this build),-),$(NCCL_FAULT))
	$(call row,MPI,$(MPI_VERSION),$(if $(MPI_VERSION),ranks in several processes,-: several processes by TCP alone),$(MPI_FAULT))
	$(call row,mpirun,$(MPIRUN_VERSION),$(if $(MPIRUN_VERSION),tests of several processes,-),$(MPIRUN_FAULT))
	$(call row,Catch2,$(CATCH2_VERSION),$(if $(CATCH2_VERSION),the tests,no tests before `make deps`),$(CATCH2_FAULT))
	$(call row,Boost.Context,$(BOOST_VERSION),$(if $(BOOST_VERSION),tests of CUDA kernels on the CPU,no tests before `make deps`),$(BOOST_FAULT))
	$(call row,sanitizers,$(ASAN_VERSION),$(if $(ASAN_VERSION),the same tests,no tests before `make deps`),$(ASAN_FAULT))
	@echo '  => train_gpt with DEVICE=$(DEVICE)$(if $(CUDA), USE_CUDNN=$(USE_CUDNN) ARCH=$(ARCH))' \
	  $(if $(ARCH_FLAGS),'ARCH_FLAGS=$(ARCH_FLAGS)',)

# After a new look at the machine, a build shows what was found.
SHOW_CONFIG := $(if $(MAKE_RESTARTS),config)

# ---- The trainer -----------------------------------------------------------------------------------------------------

REQUIRED_LIBS := -lxxhash -lcrypto -lz -lzstd -ldl
LIBS := $(REQUIRED_LIBS)
ifneq ($(MPI_VERSION),)
DEFINES += -DTRAIN_GPT_MPI $(MPI_FLAGS)
LIBS += $(MPI_LIBS)
endif

# One source, two compilers; $1 is the optimisation level, $2 a GPU other than ARCH. The flags that affect numbers are the
# same for the trainer and the tests. No -ffast-math: it reorders sums. -fno-math-errno and -fno-trapping-math change no
# result and let loops be vectorised.
HOST_FLAGS := $(ARCH_FLAGS) -fno-math-errno -fno-trapping-math -fopenmp -Wall -Wextra
SOURCE_FLAGS = -std=c++20 $1 -Illmc $(DEFINES) $(CPPFLAGS)
FLAGS_cpu = $(SOURCE_FLAGS) $(HOST_FLAGS) $(CXXFLAGS)
# Kernels call constexpr functions of the host's code, such as Philox.
CUDA_DEFINES = -DTRAIN_GPT_CUDA $(if $(NCCL_VERSION),-DTRAIN_GPT_NCCL) $(if $(CUDNN),-DTRAIN_GPT_CUDNN $(CUDNN_FLAGS))
FLAGS_cuda = $(SOURCE_FLAGS) $(CUDA_DEFINES) --expt-relaxed-constexpr $(call arch_flags,$(or $2,$(ARCH))) -ccbin $(lastword $(CXX)) \
             $(call to_host,$(HOST_FLAGS) $(CXXFLAGS)) $(NVCCFLAGS)
# Hopper's instructions for warpgroups are those of sm_90a, which runs on GPUs of compute capability 9.0 alone.
arch_flags = $(if $(filter sm_90 sm_90a,$1),-gencode=arch=compute_90a$(comma)code=sm_90a -DTRAIN_GPT_WGMMA,-arch=$1)
LINK_cpu = $(LDFLAGS) $(LIBS)
CUDA_LIBS = -lcublasLt $(if $(NCCL_VERSION),-lnccl) $(if $(CUDNN),$(CUDNN_LIBS))
LINK_cuda = $(if $(LDFLAGS),$(call to_host,$(LDFLAGS))) $(LIBS) $(CUDA_LIBS)
to_host = -Xcompiler '$(subst $(comma),\$(comma),$(strip $1))'   # nvcc would split at commas
COMPILER_cpu = $(CXX) -x c++
COMPILER_cuda = $(NVCC) -x cu
# Makes g++ collect its garbage less often.
LAVISH = $(if $(findstring g++,$(CXX_VERSION)),--param ggc-min-expand=400 --param ggc-min-heapsize=1000000)
COMPILER_VERSION := $(if $(CUDA),nvcc $(NVCC_VERSION) with )$(CXX_VERSION)

# The CPU's ops, one object for each instruction set (llmc/ops/cpu/isa.h): all programs use these. Without ARCH_FLAGS:
# runs record the name of their set, and one name must round alike in all builds.
ISA_SETS := portable stand_ins $(if $(findstring x86_64,$(shell $(CXX) -dumpmachine 2>&-)),avx2 avx512 avx512_pairs amx)
DEFINES += $(if $(filter avx2,$(ISA_SETS)),-DCPU_ISA_SETS)
CPU_OPS := $(ISA_SETS:%=build/cpu/%.o)
$(CPU_OPS): build/cpu/%.o: llmc/ops/cpu/sets/%.cpp build/cpu.flags
	@mkdir -p $(@D) && echo $<
	@$(CXX) $(CPU_OPS_FLAGS) -MMD -MP -c $< -o $@
CPU_OPS_FLAGS = -std=c++20 -O3 -Illmc $(filter -DCPU%,$(DEFINES)) $(filter-out $(ARCH_FLAGS),$(HOST_FLAGS)) \
                $(CPPFLAGS) $(CXXFLAGS)
build/cpu.flags: FORCE
	$(call text_file,$(CXX) $(CPU_OPS_FLAGS) $(CXX_VERSION))
# toml++, which nvcc cannot compile.
build/cpu/toml.o: llmc/core/toml.cpp build/cpu.flags
	@mkdir -p $(@D) && echo $<
	@$(CXX) $(CPU_OPS_FLAGS) -MMD -MP -c $< -o $@
build/cpu/all: $(CPU_OPS) build/cpu/toml.o
	@touch $@
LIBS := $(patsubst %,-Xlinker %,$(CPU_OPS) build/cpu/toml.o) $(LIBS)   # handed to the linker as they are, since -x would have them compiled

# The ops are objects of their own; what is left gains nothing at -O3, and takes a third more time to compile.
all: train_gpt
train_gpt: train_gpt.cu build/build_info.h build/cpu/all | $(SHOW_CONFIG)
	$(COMPILER_$(DEVICE)) $(call FLAGS_$(DEVICE),-O2) $(if $(CUDA),,$(LAVISH)) -Ibuild -MMD -MP -MF build/train_gpt.d \
	  -MT $@ $< -o $@ $(LINK_$(DEVICE))

# Benchmarks, each of one source. comm_bench times the collectives like nccl-tests; pipeline_bench compares a pipeline with
# data parallelism, and its bubble with the law; packing_bench shows how --pack fills sequences, and how long it takes;
# experts_bench compares grouped products of experts with dense ones; cpu_ladder times the steps of a product, compiled
# for this processor alone, beside the trainer's product for any processor.
BENCHES := $(addprefix build/,comm_bench mpi_bench pipeline_bench packing_bench experts_bench cpu_ladder)
comm-bench: build/comm_bench $(if $(MPI_VERSION),build/mpi_bench)
pipeline-bench packing-bench experts-bench: %-bench: build/%_bench
cpu-ladder: build/cpu_ladder
build/comm_bench build/mpi_bench: build/%: dev/comm/%.cpp
build/pipeline_bench build/packing_bench build/experts_bench: build/%: dev/bench/%.cpp
build/cpu_ladder: dev/cpu/ladder.cpp
$(BENCHES): build/smoke_cpu.flags build/cpu/all | $(SHOW_CONFIG)
	$(CXX) $(call FLAGS_cpu,$(if $(filter %/cpu_ladder,$@),-O3 -march=native,-O2)) $(LAVISH) -MMD -MP -MF $@.d -MT $@ \
	  $(filter %.cpp,$^) -o $@ $(LDFLAGS) $(LIBS)

# The text that --version prints. The tests and the smoke test do without it (see __has_include), or every commit would
# recompile them all.
quoted = "$(subst ",\",$(subst \,\\,$(strip $1)))"
define BUILD_INFO
// Written by make.
#pragma once
#define TRAIN_GPT_GIT_HASH $(call quoted,$(or $(if $(wildcard .git),$(shell git describe --always --dirty --abbrev=12 --exclude '*' 2>&-)),unknown))
#define TRAIN_GPT_COMPILER $(call quoted,$(COMPILER_VERSION))
#define TRAIN_GPT_FLAGS $(call quoted,$(call FLAGS_$(DEVICE),-O2) $(LINK_$(DEVICE)))
endef
build/build_info.h: FORCE
	$(call text_file,$(BUILD_INFO))

# One of the two compilers builds the trainer; the other, if present, must accept the source too. nvcc also gets the
# kernels that no trainer calls yet, and optimises nothing: this is only for its errors and warnings. smoke_cuda has the
# kernels alone for the GPU, since reading the host's code a second time takes as long as all the rest, and does not hand
# on what nvcc makes of the host's code to g++, which has seen that code; `make test-long` has whole_cuda in its place,
# which does both, as a build for a GPU.
OTHER := $(if $(CUDA),cpu,$(if $(and $(NVCC_VERSION),$(CUBLASLT_VERSION)),cuda))
SMOKE := $(if $(OTHER),$(if $(and $(LONG),$(filter cuda,$(OTHER))),whole,smoke)_$(OTHER))
smoke: train_gpt smoke-other
smoke-other: $(SMOKE:%=build/%.ok) $(if $(CUDA),build/all_kernels.o)
	@echo 'smoke: train_gpt.cu compiles with $(firstword $(COMPILER_$(DEVICE))) and $(if $(OTHER),with \
	  $(firstword $(COMPILER_$(OTHER))),was not tried with nvcc$(comma) which is not \
	  here)$(if $(filter smoke_cuda,$(SMOKE)),$(comma) for the GPU the kernels alone)'
build/smoke_cpu.ok: train_gpt.cu build/smoke_cpu.flags
	$(COMPILER_cpu) $(call FLAGS_cpu,-O0) -fsyntax-only -MMD -MP -MF build/smoke_cpu.d -MT $@ $< && touch $@
build/smoke_cuda.ok build/whole_cuda.ok: train_gpt.cu test/cuda/all_kernels.cu build/smoke_cuda.flags
	@printf '#%s\n' 'if $(if $(filter %/smoke_cuda.ok,$@),!defined __CUDA_ARCH__,1)' 'include "train_gpt.cu"' endif \
	  'include "test/cuda/all_kernels.cu"' >$(@:.ok=.cu)
	$(COMPILER_cuda) $(call FLAGS_cuda,-O0) -I. -Werror all-warnings -Xcicc -O0 -Xptxas -O0 \
	  $(if $(filter %/smoke_cuda.ok,$@),--cuda -o $(@:.ok=.ii),-Xcompiler -fsyntax-only $(call to_host,$(LAVISH)) -c -o $(@:.ok=.o)) \
	  -MMD -MP -MF $(@:.ok=.d) -MT $@ $(@:.ok=.cu) && touch $@
build/smoke_cpu.flags build/smoke_cuda.flags: build/smoke_%.flags: FORCE
	$(call text_file,$(COMPILER_$*) $(call FLAGS_$*,-O0) $(CXX_VERSION) $(NVCC_VERSION))

# ---- The tests: a folder with test_*.cpp is one program, compiled in one go --------------------------------------------

# One program per folder, but a single one for those that use the whole trainer, which takes longest to compile.
WITH_TRAINER := schedule parallel train run
TEST_FOLDERS := $(filter-out cuda fuzz,$(patsubst test/%/,%,$(sort $(dir $(wildcard test/*/test_*.cpp)))))
TEST_NAMES := $(filter-out $(WITH_TRAINER),$(TEST_FOLDERS)) trainer
$(foreach name,$(TEST_NAMES),$(eval FOLDERS_$(name) := $(name)))
FOLDERS_trainer := $(WITH_TRAINER)
TEST_FLAGS = $(call FLAGS_cpu,-Og) -Itest -I. $(LAVISH)

build/nvml_stand_in.so: test/nvml_stand_in.h
build/file_ops.so build/net_ops.so build/nvml_stand_in.so: build/%.so: test/%.cpp
	@echo $< && $(CXX) -std=c++20 -O1 -Wall -Wextra -shared -fPIC $< -o $@ -ldl

# $(call joined,SOURCES): a rule's recipe that writes them as one source.
define joined
@mkdir -p $(@D) && scripts/join_tests.sh $1 >$@.$(NEW)
$(move_if_changed)
endef
$(TEST_NAMES:%=build/test/%.cpp): build/test/%.cpp: FORCE
	$(call joined,$(wildcard $(FOLDERS_$*:%=test/%/test_*.cpp)))
# g++ looks for pch.h.gch before it looks for pch.h; with build/pch before test/ it finds the precompiled one.
$(TEST_NAMES:%=build/test/%.o): build/test/%.o: build/test/%.cpp build/pch/pch.h.gch
	@echo '$(FOLDERS_$*:%=test/%)'
	@$(CXX) -Ibuild/pch -include pch.h -Winvalid-pch $(TEST_FLAGS) -MMD -MP -MT $@ -c $< -o $@
$(TEST_NAMES:%=build/test/%): build/test/%: build/test/%.o build/test/main.o build/test_link.list build/cpu/all
	@$(CXX) $(HOST_FLAGS) $(CXXFLAGS) $(filter %.o,$^) -o $@ $(LDFLAGS) $(CATCH2_LIBS) $(LIBS)
build/test/main.o: test/main.cpp test/catch2.h build/test.flags
	@mkdir -p $(@D) && echo test/main.cpp
	@$(CXX) $(TEST_FLAGS) -O0 -c $< -o $@
build/pch/pch.h.gch: test/pch.h test/catch2.h build/test.flags | $(SHOW_CONFIG)
	@mkdir -p $(@D) && echo 'test/pch.h'
	@$(CXX) $(TEST_FLAGS) -x c++-header $< -o $@
build/test.flags: FORCE
	$(call text_file,$(CXX) $(TEST_FLAGS) $(CXX_VERSION) $(CATCH2_VERSION))
build/test_link.list: FORCE
	$(call text_file,$(LDFLAGS) $(CATCH2_LIBS) $(LIBS))

# Run by mpirun, in test/scripts/mpi_test.sh.
build/mpi/exchanges: test/mpi/exchanges.cpp build/test.flags build/cpu/all
	@mkdir -p $(@D) && echo $<
	@$(CXX) $(TEST_FLAGS) -MMD -MP $< -o $@ $(LDFLAGS) $(LIBS)

# ---- CUDA kernels on a CPU: test/cuda_on_cpu/README.md ---------------------------------------------------------------

# Compiled with the C++ compiler: with AddressSanitizer, which also runs all orders of threads, and with ThreadSanitizer;
# `make test` has the tests of the trainer without either, which takes half the time to compile and a third to run.
# Without OpenMP, whose threads are not under test; only its library is linked, because the CPU's ops ask it for thread
# numbers. -Og takes two thirds of the time of -O1 to compile, and its programs a tenth to a fifth more to run. The
# emulator itself is at -O2 and the CPU's ops at -O1: they are small, and run for minutes; not so what stands in for
# CUDA's runtime and NCCL.
LADDERS := dev/cuda/layernorm.cu dev/cuda/classifier.cu dev/cuda/adamw.cu dev/cuda/attention.cu
# Excluded: the test of a library for GPUs.
CUDNN_TEST := test/cuda/test_attention_cudnn.cpp
CUDA_TESTS := kernels emulator trainer
SOURCES_kernels := $(filter-out $(CUDNN_TEST),$(wildcard test/cuda/test_*.cpp test/cuda/experts/test_*.cpp))
SOURCES_emulator := $(wildcard test/cuda/emulator/test_*.cpp)
SOURCES_trainer := $(wildcard test/cuda/trainer/test_*.cpp)
STAND_INS := $(wildcard test/cuda_on_cpu/*.cpp test/cuda_on_cpu/*/*.cpp)
# The CPU's ops in the portable version alone, compiled here so that sanitizers see into them.
PORTABLE_OPS := llmc/ops/cpu/sets/portable.cpp llmc/ops/cpu/sets/stand_ins.cpp
CUDA_TEST_FLAGS = -std=c++20 -Og $(ARCH_FLAGS) -DTRAIN_GPT_CUDA -DTRAIN_GPT_NCCL -Illmc -Itest -Itest/cuda_on_cpu -I. -Wall -Wextra \
                  -Wno-unknown-pragmas -Wno-unused-parameter -Wno-restrict -fno-strict-aliasing \
                  -fno-omit-frame-pointer $(LAVISH) $(CPPFLAGS) $(CXXFLAGS)
EMULATOR_LEVEL := -O2
# -rdynamic: kernels are named by their symbols. Sorted: otherwise g++ 12's sanitizers miss the lines of some templates.
CUDA_TEST_LINK_FLAGS := -fopenmp -rdynamic -Wl,--sort-section=name
# Null pointers, object bounds and sums of addresses are left to AddressSanitizer, which detects what they lead to: those
# checks take longest to compile. The tests of the trainer leave all pointer checks to it; the kernels have them in their
# own tests. Their reports name lines of the source: nothing else needs debugging information.
SANITIZE_asan := -g1 -fsanitize=address,undefined -fno-sanitize=null,object-size,nonnull-attribute,returns-nonnull-attribute \
                 -fno-sanitize=pointer-overflow -fno-sanitize-recover=undefined
build/asan/trainer.o: SANITIZE_ASAN_MORE := -fno-sanitize=alignment,vptr
SANITIZE_tsan := -g1 -fsanitize=thread

$(CUDA_TESTS:%=build/cuda/%.cpp): build/cuda/%.cpp: FORCE
	$(call joined,$(SOURCES_$*))
define CUDA_TEST_RULES   # $1: asan or tsan
build/$1/kernels: $(LADDERS:%.cu=build/$1/%.o)
$(CUDA_TESTS:%=build/$1/%): build/$1/%: build/$1/%.o $(STAND_INS:%.cpp=build/$1/%.o) $(PORTABLE_OPS:%.cpp=build/$1/%.o) build/test/main.o build/cuda_test_link.list
	@$$(CXX) $(SANITIZE_$1) $(CUDA_TEST_LINK_FLAGS) $$(filter %.o,$$^) -o $$@ $$(LDFLAGS) $$(CATCH2_LIBS) -lboost_context $(REQUIRED_LIBS)
$(CUDA_TESTS:%=build/$1/%.o): build/$1/%.o: build/cuda/%.cpp build/cuda_test.flags
	@mkdir -p $$(@D) && echo 'test/cuda: $$* ($1)'
	@$$(CXX) $(SANITIZE_$1) $$(SANITIZE_ASAN_MORE) $$(CUDA_TEST_FLAGS) -MMD -MP -c $$< -o $$@
build/$1/llmc/%.o: llmc/%.cpp build/cuda_test.flags
	@mkdir -p $$(@D) && echo '$$< ($1)'
	@$$(CXX) $(SANITIZE_$1) $$(CUDA_TEST_FLAGS) -O1 -MMD -MP -c $$< -o $$@
build/$1/test/cuda_on_cpu/%.o: FASTER := $(EMULATOR_LEVEL)
build/$1/test/cuda_on_cpu/runtime/%.o build/$1/test/cuda_on_cpu/nccl/%.o: FASTER :=
build/$1/test/%.o: test/%.cpp build/cuda_test.flags
	@mkdir -p $$(@D) && echo '$$< ($1)'
	@$$(CXX) $(SANITIZE_$1) $$(CUDA_TEST_FLAGS) $$(FASTER) -MMD -MP -c $$< -o $$@
build/$1/dev/%.o: dev/%.cu build/cuda_test.flags
	@mkdir -p $$(@D) && echo '$$< ($1)'
	@$$(CXX) -x c++ $(SANITIZE_$1) $$(CUDA_TEST_FLAGS) -MMD -MP -c $$< -o $$@
endef
$(eval $(call CUDA_TEST_RULES,asan))
$(eval $(call CUDA_TEST_RULES,tsan))
$(eval $(call CUDA_TEST_RULES,emulated))

# The trainer built for GPUs, with emulated GPUs and no sanitizers: for tests that run it as several processes.
build/emulated/train_gpt: build/emulated/train_gpt.o $(STAND_INS:%.cpp=build/emulated/%.o) $(PORTABLE_OPS:%.cpp=build/emulated/%.o) build/cuda_test_link.list | build/cpu/toml.o
	@$(CXX) $(CUDA_TEST_LINK_FLAGS) $(filter %.o,$^) -o $@ $(LDFLAGS) -lboost_context $(filter-out -Xlinker $(CPU_OPS),$(LIBS))
build/emulated/train_gpt.o: train_gpt.cu build/cuda_test.flags
	@mkdir -p $(@D) && echo 'train_gpt.cu (emulated)'
	@$(CXX) -x c++ $(CUDA_TEST_FLAGS) -MMD -MP -c $< -o $@

# The trainer for CPUs with ThreadSanitizer, for test/scripts/long_thread_sanitizer_test.sh: ranks, workers, writers and
# what watches them are threads. Without OpenMP, as above.
build/tsan/cpu/train_gpt: build/tsan/cpu/train_gpt.o $(PORTABLE_OPS:%.cpp=build/tsan/%.o) build/tsan/llmc/core/toml.o
	@$(CXX) $(SANITIZE_tsan) -fopenmp -rdynamic $(filter %.o,$^) -o $@ $(LDFLAGS) $(filter-out -Xlinker $(CPU_OPS) build/cpu/toml.o,$(LIBS))
build/tsan/cpu/train_gpt.o: train_gpt.cu build/cuda_test.flags
	@mkdir -p $(@D) && echo 'train_gpt.cu (tsan)'
	@$(CXX) -x c++ -std=c++20 -O1 -Illmc $(filter-out -DCPU_ISA_SETS,$(DEFINES)) $(ARCH_FLAGS) -Wall -Wextra -Wno-unknown-pragmas \
	  $(LAVISH) $(CPPFLAGS) $(CXXFLAGS) $(SANITIZE_tsan) -MMD -MP -c $< -o $@

# dev/gpu/rehearse.sh runs these in place of the programs for a GPU.
build/emulated/ladders: $(patsubst %.cu,build/emulated/%.o,dev/cuda/ladders.cu $(LADDERS))
build/emulated/op_table: build/emulated/dev/bench/cuda/op_table.o
build/emulated/ladders build/emulated/op_table: $(STAND_INS:%.cpp=build/emulated/%.o) $(PORTABLE_OPS:%.cpp=build/emulated/%.o) build/cuda_test_link.list
	@$(CXX) $(CUDA_TEST_LINK_FLAGS) $(filter %.o,$^) -o $@ $(LDFLAGS) -lboost_context $(REQUIRED_LIBS)

build/cuda_test.flags: FORCE
	$(call text_file,$(CXX) $(CUDA_TEST_FLAGS) $(EMULATOR_LEVEL) $(SANITIZE_asan) $(SANITIZE_tsan) $(CXX_VERSION) $(CATCH2_VERSION) $(BOOST_VERSION))
build/cuda_test_link.list: FORCE
	$(call text_file,$(STAND_INS) $(CUDA_TEST_LINK_FLAGS) $(LDFLAGS))

# ---- Fuzzing: the readers of all formats, in a program under sanitizers ----------------------------------------------

# Without optimisation, and with no pointer checks but AddressSanitizer's, because compiling takes longer than running.
FUZZ_FLAGS = -std=c++20 -O0 -Illmc -Itest -I. $(ARCH_FLAGS) -fopenmp -Wall -Wextra -fno-omit-frame-pointer $(LAVISH) \
             $(CPPFLAGS) $(CXXFLAGS) $(SANITIZE_asan) -fno-sanitize=alignment,vptr
build/asan/fuzz.o: test/fuzz/test_fuzz.cpp build/fuzz.flags
	@mkdir -p $(@D) && echo 'test/fuzz (asan)'
	@$(CXX) $(FUZZ_FLAGS) -MMD -MP -c $< -o $@
build/asan/fuzz: build/asan/fuzz.o $(PORTABLE_OPS:%.cpp=build/asan/%.o) build/asan/llmc/core/toml.o build/test/main.o
	@$(CXX) $(FUZZ_FLAGS) $(filter %.o,$^) -o $@ $(LDFLAGS) $(CATCH2_LIBS) $(REQUIRED_LIBS)
build/fuzz.flags: FORCE
	$(call text_file,$(CXX) $(FUZZ_FLAGS) $(CXX_VERSION) $(CATCH2_VERSION))

# ---- Running them: scripts/run_tests.sh -------------------------------------------------------------------------------

# Each program is one job, which compiles and runs it, so that the first results come while the rest is compiled. The
# jobs that take longest begin first, or the last of them would run while other processors idle; then come those that do
# not need train_gpt, since one that needs it before it is built would be put off until all others have begun. Long tests
# all wait for it, since one that needs it takes longest.
CALLERS := $(patsubst test/%/,%,$(sort $(dir $(shell grep -lE 'run_program|\./train_gpt' test/*/*.cpp test/*/*.h))))
RUN_THE_TRAINER := trainer $(strip $(foreach name,$(filter-out trainer,$(TEST_NAMES)),$(if $(filter $(CALLERS),$(name)),$(name))))
EMULATED_TRAINER := $(if $(LONG),asan,emulated)/trainer
LONGEST_TESTS := $(if $(LONG),test/trainer tsan/trainer) $(EMULATED_TRAINER) asan/kernels
ALL_TEST_PROGRAMS := $(LONGEST_TESTS) $(filter-out $(LONGEST_TESTS), \
                     $(patsubst %,test/%,$(filter-out $(RUN_THE_TRAINER),$(TEST_NAMES)) $(RUN_THE_TRAINER)) \
                     asan/emulator asan/fuzz $(if $(LONG),$(CUDA_TESTS:%=tsan/%)))
TEST_PROGRAMS := $(if $(FAULTS),test/faults test/net,$(ALL_TEST_PROGRAMS))
# The test of fresh machines is a separate target: it takes an hour, root and the network.
FRESH_TEST := test/scripts/long_fresh_machine_test.sh
FAULT_SCRIPTS := test/scripts/dead_ranks_test.sh test/scripts/supervise_test.sh test/scripts/spares_test.sh
TEST_SCRIPTS := $(if $(FAULTS),$(FAULT_SCRIPTS),$(if $(TESTS),,$(filter-out $(FRESH_TEST) $(if $(LONG),,test/scripts/long_%),$(wildcard test/scripts/*_test.sh))))
TEST_RUNS := $(patsubst %,run/%,$(firstword $(TEST_PROGRAMS)) $(if $(FAULTS),,smoke) $(wordlist 2,99,$(TEST_PROGRAMS))) \
             $(TEST_SCRIPTS:test/scripts/%=run/%)
# Files that several of them need are built before the first one begins; the trainer, which takes longer to compile than
# all of those, before the programs that run it.
SHARED_BY_TESTS := build/pch/pch.h.gch build/test/main.o build/file_ops.so build/net_ops.so build/nvml_stand_in.so \
                   $(if $(FAULTS),,$(foreach kind,asan $(if $(LONG),,emulated),$(patsubst %.cpp,build/$(kind)/%.o,$(STAND_INS) $(PORTABLE_OPS)))) \
                   $(if $(LONG),$(patsubst %.cpp,build/tsan/%.o,$(STAND_INS) $(PORTABLE_OPS))) build/cpu/all
.PHONY: $(TEST_RUNS)
$(TEST_RUNS): $(SHARED_BY_TESTS)
$(if $(LONG),$(TEST_RUNS)) $(RUN_THE_TRAINER:%=run/test/%) $(TEST_SCRIPTS:test/scripts/%=run/%): train_gpt
$(TEST_PROGRAMS:%=run/%): run/%:
	+@$(MAKE) -s build/$* && scripts/run_tests.sh run $(subst /,-,$*) build/$*
run/smoke:
	+@$(MAKE) smoke-other
run/tokenizer_test.sh: run/test/text
run/instruction_sets_test.sh: run/test/ops
run/mpi_test.sh: $(if $(MPI_VERSION),build/mpi/exchanges)
$(TEST_SCRIPTS:test/scripts/%=run/%): run/%:
	@scripts/run_tests.sh run $* test/scripts/$*
test-runs: $(firstword $(TEST_RUNS)) train_gpt $(TEST_RUNS)
test-sum:
	@scripts/run_tests.sh sum $(STATUS) $(subst /,-,$(patsubst run/%,%,$(filter-out run/smoke,$(TEST_RUNS))))
tests: train_gpt $(SHARED_BY_TESTS) $(TEST_PROGRAMS:%=build/%) smoke

# The same tests on a GPU, once instead of under all schedules.
test-cuda: build/test_cuda_on_gpu
	build/test_cuda_on_gpu
# The tests are compiled as two sources, as for emulated GPUs: it is the kernels in each object that take minutes. The
# slowest comes first. What runs on the host is a small part.
build/test_cuda_on_gpu: $(patsubst %,build/gpu/%.o,trainer kernels $(basename $(LADDERS) $(if $(CUDNN),$(CUDNN_TEST)))) build/test/main.o build/cpu/all
	$(NVCC) -ccbin $(lastword $(CXX)) $(call to_host,-fopenmp) $(filter %.o,$^) -o $@ $(CATCH2_LIBS) $(LINK_cuda)
gpu_object = $(NVCC) -x cu $(call FLAGS_cuda,-O1) -Itest -I. -MMD -MP -c $< -o $@
build/gpu/trainer.o build/gpu/kernels.o: build/gpu/%.o: build/cuda/%.cpp build/smoke_cuda.flags
	@mkdir -p $(@D)
	$(gpu_object)
build/gpu/%.o: %.cpp build/smoke_cuda.flags
	@mkdir -p $(@D)
	$(gpu_object)
build/gpu/%.o: %.cu build/smoke_cuda.flags
	@mkdir -p $(@D)
	$(gpu_object)

# Every version of the kernels in dev/cuda/, timed on a GPU.
ladders: build/ladders
build/ladders: $(patsubst %.cu,build/gpu/%.o,dev/cuda/ladders.cu $(LADDERS)) build/cpu/all
	$(NVCC) -ccbin $(lastword $(CXX)) $(call to_host,-fopenmp) $(filter %.o,$^) -o $@ $(LINK_cuda)

# Times each op of a training step on a GPU.
build/op_table: dev/bench/cuda/op_table.cu build/smoke_cuda.flags build/cpu/all
	$(NVCC) -x cu $(call FLAGS_cuda,-O2) -MMD -MP -MF build/op_table.d -MT $@ $< -o $@ $(LINK_cuda)

# Compiles the same kernels with nvcc, allowing no warnings.
build/all_kernels.o: test/cuda/all_kernels.cu build/smoke_cuda.flags
	$(NVCC) -x cu $(call FLAGS_cuda,-O0) -Werror all-warnings -MMD -MP -c $< -o $@

# The same for every generation of GPUs that they are written for: takes minutes, so it is not among the tests.
check-archs: $(patsubst %,build/all_kernels_%.o,sm_80 sm_90 sm_100)
	@echo 'check-archs: $(^:build/all_kernels_%.o=%) take all kernels without a warning'
build/all_kernels_sm_%.o: test/cuda/all_kernels.cu build/smoke_cuda.flags
	$(NVCC) -x cu $(call FLAGS_cuda,-O0,sm_$*) -Werror all-warnings -MMD -MP -c $< -o $@

-include $(wildcard build/*.d build/test/*.d build/mpi/*.d build/cpu/*.d $(foreach d,/ /*/ /*/*/ /*/*/*/ /*/*/*/*/,build/[at]san$d*.d build/emulated$d*.d build/gpu$d*.d))

# ---- Checks: each may be made alone ----------------------------------------------------------------------------------

FIND_SOURCES = find . \( -name .git -o -name build -o -name '.venv*' \) -prune -o -type f
# Every version of clang-format formats some lines in its own way.
CLANG_FORMAT ?= $(if $(findstring version 14.,$(shell clang-format --version 2>&-)),clang-format,$(shell command -v clang-format-14))
NO_CLANG_FORMAT := it takes clang-format 14, and other versions format differently: pip install clang-format==14.0.6
CXX_SOURCES = $(FIND_SOURCES) \( -name '*.h' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp' \) -print

check-floors:
	@scripts/check_floors.sh
check-headers:
	@FLAGS="$(call FLAGS_cpu,-O0) $(LAVISH)" CUDA_FLAGS="$(CUDA_TEST_FLAGS) -g0" JOBS=$(JOBS) scripts/check_headers.sh
check-format:
	@if [ -z '$(CLANG_FORMAT)' ]; then echo 'check-format: not checked: $(NO_CLANG_FORMAT)'; else \
	  $(CXX_SOURCES) | xargs -r $(CLANG_FORMAT) --dry-run -Werror && echo 'check-format: ok'; fi
check-shell:
	@($(FIND_SOURCES) -name '*.sh' -print; ls .ci/run) | xargs -r -n 4 shellcheck -x
	@($(FIND_SOURCES) -name '*.sh' -print; ls .ci/run) | xargs -r scripts/check_shell.sh
	@echo 'check-shell: ok'
check-python:
	@$(FIND_SOURCES) -name '*.py' -print | PYTHONPYCACHEPREFIX=build/pycache xargs -r python3 -m py_compile && \
	  echo 'check-python: ok'

# ---- The outer targets -----------------------------------------------------------------------------------------------

INSTALL := scripts/install_deps.sh --if-needed
# $1 jobs, unless make was called with -j
again = $(MAKE) $(if $(filter -j% --jobserver%,$(MAKEFLAGS)),,-j$1)
AGAIN = $(call again,$(JOBS))
# Tests also wait: for signals, for the disk, for each other.
TEST_JOBS := $(if $(filter file,$(origin JOBS)),$(shell expr $(JOBS) + 1),$(JOBS))

help:
	@sed -n 's/^## \{0,1\}//p' Makefile
deps:
	@scripts/install_deps.sh
run:
	@$(INSTALL) build run
	@$(AGAIN) train_gpt
	@data/prepare_kjv.sh
	@PYTHON="$$(scripts/find_python.sh matplotlib)" scripts/run_kjv.sh $(RUN_FLAGS)
test test-long: export LONG = $(filter test-long,$@)
test-faults: export FAULTS = 1
test-faults: export TESTS = [faults],[failures]
test test-long test-faults:
	@$(INSTALL) build test $(if $(LONG),long)
	@rm -rf build/results
	@status=0; $(call again,$(TEST_JOBS)) --keep-going test-runs || status=$$?; $(MAKE) test-sum STATUS=$$status
test-fresh:
	@$(FRESH_TEST)
check:
	@$(INSTALL) build check
	@$(AGAIN) --keep-going check-headers check-shell check-floors check-format check-python
	@$(MAKE) -s check-sum
check-sum:
	@echo 'check: all passed$(if $(CLANG_FORMAT),, but check-format, which was not run)'
bench:
	@$(INSTALL) build
	@$(AGAIN) train_gpt
	@dev/bench/run.sh $(BENCH_FLAGS)
bench-checkpoint:
	@$(INSTALL) build
	@$(AGAIN) train_gpt
	@dev/bench/checkpoint.sh $(BENCH_FLAGS)
bench-dist:
	@$(INSTALL) build test
	@$(AGAIN) train_gpt comm-bench pipeline-bench
	@dev/bench/distributed.py $(BENCH_FLAGS)
	@build/pipeline_bench
	@if [ -x build/mpi_bench ]; then dev/comm/beside_mpi.sh; fi
bench-cuda:
	@$(INSTALL) build
	@$(AGAIN) DEVICE=cuda train_gpt build/op_table
	build/op_table $(OP_TABLE_FLAGS)
	@dev/bench/run.sh --device cuda $(BENCH_FLAGS)
reconfigure:
	@rm -f build/config.mk
	@$(MAKE) config
format:
	@$(INSTALL) check
	@$(MAKE) -s format-sources
format-sources:
	@[ -n '$(CLANG_FORMAT)' ] || { echo 'make format: $(NO_CLANG_FORMAT)' >&2; exit 1; }
	@$(CXX_SOURCES) | xargs -r $(CLANG_FORMAT) -i
clean:
	rm -rf build train_gpt
