// The emulated CUDA runtime: devices, host threads, streams and events, memory.
#include <atomic>
#include <barrier>
#include <chrono>
#include <source_location>
#include <thread>

#include "cuda/emulator/emulator_test.h"
#include "cuda_on_cpu/cublasLt.h"

using namespace llmc;
using namespace planted;

namespace {

constexpr int n = 64;
constexpr size_t bytes = n * sizeof(float);

void add(cudaStream_t stream, float* out, const float* x) { launch(add_one<Bug::none>, 1, 32, 0, stream, out, x, n); }

// As a trainer would write it for both compilers: the site is the caller's line.
template <class Where = std::source_location>
cudaError_t wait_event(cudaStream_t stream, cudaEvent_t event, const Where& where = Where::current()) {
  if constexpr (requires { cudaStreamWaitEvent(stream, event, 0, where); })
    return cudaStreamWaitEvent(stream, event, 0, where);
  else return cudaStreamWaitEvent(stream, event, 0);
}

}  // namespace

// ---- Devices --------------------------------------------------------------------------------------------------------

TEST_CASE("there may be several emulated devices", "[cuda][emulator]") {
  const Devices devices(2, 4096);
  int count = 0, device = -1;
  REQUIRE((cudaGetDeviceCount(&count) == cudaSuccess && count == 2));
  REQUIRE(cudaSetDevice(2) == cudaErrorInvalidDevice);
  REQUIRE(cudaGetLastError() == cudaErrorInvalidDevice);
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  std::thread([] {  // every host thread begins with the first device
    int its = -1;
    REQUIRE((cudaGetDevice(&its) == cudaSuccess && its == 0));
  })
      .join();
  REQUIRE((cudaGetDevice(&device) == cudaSuccess && device == 1));

  char first[16], second[16];
  REQUIRE(cudaDeviceGetPCIBusId(first, 16, 0) == cudaSuccess);
  REQUIRE(cudaDeviceGetPCIBusId(second, 16, 1) == cudaSuccess);
  REQUIRE(std::string(first) == "0000:01:00.0");
  REQUIRE(std::string(second) == "0000:02:00.0");

  float *p = nullptr, *q = nullptr;
  size_t free = 0, total = 0;
  REQUIRE(cudaMalloc(&p, 4000) == cudaSuccess);
  REQUIRE((cudaMemGetInfo(&free, &total) == cudaSuccess && free == 96 && total == 4096));
  REQUIRE(cudaMalloc(&q, 100) == cudaErrorMemoryAllocation);
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  REQUIRE(cudaMalloc(&q, 100) == cudaSuccess);  // the other one has its own memory
  REQUIRE(cudaFree(q) == cudaSuccess);
  REQUIRE_THAT(failure_of([] { cuda_on_cpu::set_devices(2); }),
               ContainsSubstring("not released: 0 streams and 4000 bytes of device 1;"));
  REQUIRE(failure_of([] { cuda_on_cpu::set_devices(2); }) == "no failure");
  cudaGetLastError();
}

TEST_CASE("there may be no device, or no recent enough driver", "[cuda][emulator]") {
  for (const cudaError_t why : {cudaErrorNoDevice, cudaErrorInsufficientDriver}) {
    cuda_on_cpu::set_devices(0, 0, why);
    int count = -1, version = 0;
    void* p = nullptr;
    cudaStream_t stream = nullptr;
    CHECK((cudaGetDeviceCount(&count) == why && count == 0));
    CHECK(cudaSetDevice(0) == why);
    CHECK(cudaMalloc(&p, 4) == why);
    CHECK(cudaStreamCreate(&stream) == why);
    CHECK((cudaDriverGetVersion(&version) == cudaSuccess &&
           version == (why == cudaErrorNoDevice ? CUDART_VERSION : CUDART_VERSION - 1000)));
    CHECK((cudaRuntimeGetVersion(&version) == cudaSuccess && version == CUDART_VERSION));
    cuda_on_cpu::set_devices(1);
  }
  cudaGetLastError();
}

TEST_CASE("streams, events and memory belong to a device", "[cuda][emulator]") {
  const Devices devices(2);
  TestStream stream0;
  TestEvent event0;
  DeviceArray<float> x(counted(n));
  CUDA_CHECK(cudaSetDevice(1));
  {
    TestStream stream1;
    DeviceArray<float> y(n), z(n);
    REQUIRE_THAT(failure_of([&] { add(stream0, y, y); }),
                 ContainsSubstring("is launched on stream 1 of device 0 while device 1 is the current one"));
    REQUIRE_THAT(failure_of([&] { cudaEventRecord(event0, stream1); }), ContainsSubstring("an event of device 0"));
    REQUIRE_THAT(failure_of([&] { cuda_on_cpu::require_device_memory(x, 4, "x"); }),
                 ContainsSubstring("x: memory of device 0 where memory of device 1 is needed"));
    // Copies cross, and so do waits for events.
    CUDA_CHECK(cudaMemcpyAsync(y, x, bytes, cudaMemcpyDeviceToDevice, stream0));
    CUDA_CHECK(cudaEventRecord(event0, stream0));
    CUDA_CHECK(cudaStreamWaitEvent(stream1, event0));
    add(stream1, z, y);
    CUDA_CHECK(cudaMemcpyAsync(y, z, bytes, cudaMemcpyDefault, stream1));
    REQUIRE(y.host()[0] == 2);
  }
  CUDA_CHECK(cudaSetDevice(0));
}

// ---- Host threads ---------------------------------------------------------------------------------------------------

TEST_CASE("a host waits for what other hosts have enqueued on other devices", "[cuda][emulator]") {
  const auto run = []() -> Outputs {
    const Devices devices(3);
    std::vector<float> result;
    {
      std::vector<std::unique_ptr<TestStream>> streams(3);
      std::vector<std::unique_ptr<TestEvent>> events(3);
      std::vector<std::unique_ptr<DeviceArray<float>>> arrays(3);
      std::barrier<> step(3);
      const auto rank = [&](size_t r) {
        CUDA_CHECK(cudaSetDevice(static_cast<int>(r)));
        streams[r] = std::make_unique<TestStream>();
        events[r] = std::make_unique<TestEvent>();
        arrays[r] = std::make_unique<DeviceArray<float>>(counted(n));
        step.arrive_and_wait();
        for (size_t turn = 0; turn < 3; ++turn) {  // each adds to the previous one's result
          if (turn == r) {
            if (r > 0) {
              CUDA_CHECK(cudaStreamWaitEvent(*streams[r], *events[r - 1]));
              CUDA_CHECK(cudaMemcpyAsync(*arrays[r], *arrays[r - 1], bytes, cudaMemcpyDefault, *streams[r]));
            }
            add(*streams[r], *arrays[r], *arrays[r]);
            CUDA_CHECK(cudaEventRecord(*events[r], *streams[r]));
          }
          step.arrive_and_wait();
        }
        if (r == 2) result = arrays[r]->host();  // the others have long been waiting for the barrier, not for streams
        step.arrive_and_wait();
        arrays[r].reset();
        streams[r].reset();
        events[r].reset();
      };
      std::vector<std::thread> hosts;
      for (size_t r = 0; r < 3; ++r) hosts.emplace_back(rank, r);
      for (std::thread& host : hosts) host.join();
    }
    return {{"sum", result}};
  };
  std::vector<float> right = counted(n);
  for (float& x : right) x += 3;
  check_kernel(run, {{"sum", right}}, 1e-30);
}

TEST_CASE("a failure on one host thread is reported to the others", "[cuda][emulator]") {
  const Devices devices(2);
  std::barrier<> step(2);
  std::string told[2];
  const auto rank = [&](int r) {
    CUDA_CHECK(cudaSetDevice(r));
    TestStream stream;
    DeviceArray<float> x(counted(128)), y(128);
    if (r == 0) launch(reverse<Bug::early_return>, 1, 128, 0, stream, y, x);
    else add(stream, y, x);
    step.arrive_and_wait();
    if (r == 0) told[r] = failure_of([&] { cudaStreamSynchronize(stream); });
    step.arrive_and_wait();
    if (r == 1) told[r] = failure_of([&] { cudaStreamSynchronize(stream); });
    demand(failure_of([&] { cudaStreamSynchronize(stream); }) == "no failure");  // once
  };
  std::thread first(rank, 0), second(rank, 1);
  first.join();
  second.join();
  REQUIRE_THAT(told[0], ContainsSubstring("planted::reverse") && ContainsSubstring("divergent barrier"));
  REQUIRE_THAT(told[1], ContainsSubstring("the work of stream 1 of device 1 was dropped when this failed on another "
                                          "host thread: kernel void planted::reverse"));
}

TEST_CASE("with hosts first, the schedule alone orders the tasks of all devices", "[cuda][emulator]") {
  const Devices devices(2);
  cuda_on_cpu::set_hosts_first(true);
  struct Order {
    std::string letters = "--------";
    std::atomic<size_t> next = 0;  // streams write at the same time, for all that ThreadSanitizer knows
  } order;
  std::pair<Order*, char> letters[2][2] = {{{&order, 'a'}, {&order, 'b'}}, {{&order, 'A'}, {&order, 'B'}}};
  std::barrier<> known(2);
  const auto rank = [&](int r) {
    CUDA_CHECK(cudaSetDevice(r));
    TestStream streams[2];
    known.arrive_and_wait();
    const auto begin = std::chrono::steady_clock::now();  // one host is late: it spins instead of sleeping
    while (r == 1 && std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(50)) {
    }
    for (int i = 0; i < 4; ++i)
      CUDA_CHECK(cudaLaunchHostFunc(
          streams[i % 2],
          [](void* argument) {
            const auto& [all, letter] = *static_cast<std::pair<Order*, char>*>(argument);
            all->letters[all->next++] = letter;
          },
          &letters[r][i % 2]));
    if (r == 1) CUDA_CHECK(cudaStreamSynchronize(streams[0]));
    else
      while (cudaStreamQuery(streams[1]) == cudaErrorNotReady) {
      }
  };
  std::thread first(rank, 0), second(rank, 1);
  first.join();
  second.join();
  cuda_on_cpu::set_hosts_first(false);
  REQUIRE(order.letters == "aaAAbbBB");
}

// ---- Streams and events ---------------------------------------------------------------------------------------------

TEST_CASE("a host that polls sees its streams make progress", "[cuda][emulator]") {
  TestStream stream;
  TestEvent event;
  DeviceArray<float> x(counted(n)), y(n);
  REQUIRE(cudaEventQuery(event) == cudaSuccess);  // never recorded
  add(stream, y, x);
  CUDA_CHECK(cudaEventRecord(event, stream));
  add(stream, x, y);
  REQUIRE(cudaEventQuery(event) == cudaErrorNotReady);
  while (cudaEventQuery(event) == cudaErrorNotReady) {
  }
  REQUIRE(cudaStreamQuery(stream) == cudaErrorNotReady);
  while (cudaStreamQuery(stream) == cudaErrorNotReady) {
  }
  REQUIRE(x.host()[0] == 3);
}

TEST_CASE("a host function runs in stream order", "[cuda][emulator]") {
  TestStream stream;
  Pinned host(n, 1);
  DeviceArray<float> x(n);
  CUDA_CHECK(cudaMemcpyAsync(x, host, bytes, cudaMemcpyHostToDevice, stream));
  add(stream, x, x);
  CUDA_CHECK(cudaMemcpyAsync(host, x, bytes, cudaMemcpyDeviceToHost, stream));
  float seen = 0;
  std::pair<float*, float*> places(host, &seen);
  CUDA_CHECK(cudaLaunchHostFunc(
      stream,
      [](void* argument) {
        const auto* pair = static_cast<std::pair<float*, float*>*>(argument);
        *pair->second = pair->first[0];
      },
      &places));
  if (!cuda_on_cpu::thread_sanitizer) REQUIRE(seen == 0);  // reading it now is a real race
  CUDA_CHECK(cudaStreamSynchronize(stream));
  REQUIRE(seen == 2);
  CUDA_CHECK(cudaLaunchHostFunc(
      stream, [](void*) { cudaDeviceSynchronize(); }, nullptr));
  REQUIRE_THAT(failure_of([&] { cudaStreamSynchronize(stream); }), ContainsSubstring("must not call the CUDA runtime"));
}

TEST_CASE("the site of an event wait is the caller of its wrapper", "[cuda][emulator]") {
  const auto run = []() -> Outputs {
    TestStream a, b;
    TestEvent forth, back;
    DeviceArray<float> x(counted(n)), y(counted(n));
    add(a, y, x);
    CUDA_CHECK(cudaEventRecord(forth, a));
    CUDA_CHECK(wait_event(b, forth));  // y is written
    add(b, x, y);
    CUDA_CHECK(cudaEventRecord(back, b));
    CUDA_CHECK(wait_event(a, back));  // y is read
    add(a, y, x);
    return {{"y", y.host()}};
  };
  std::vector<cuda_on_cpu::Site> sites;
  cuda_on_cpu::record_sites(&sites);
  run();
  cuda_on_cpu::record_sites(nullptr);
  REQUIRE(sites.size() == 2);
  REQUIRE(sites[0].source() == "test_emulator_runtime.cpp: CUDA_CHECK(wait_event(b, forth));  // y is written");
  REQUIRE(sites[1].source() == "test_emulator_runtime.cpp: CUDA_CHECK(wait_event(a, back));  // y is read");
  check_barriers(run);
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

#ifndef __SANITIZE_THREAD__  // which ends the program at such races: see below

TEST_CASE("a host that does not wait reads old values", "[cuda][emulator]") {
  TestStream stream;
  DeviceArray<float> out(n), x(counted(n));
  Pinned host(n);
  add(stream, out, x);
  CUDA_CHECK(cudaMemcpyAsync(host, out, bytes, cudaMemcpyDeviceToHost, stream));
  REQUIRE(host[0] == 0);
  CUDA_CHECK(cudaStreamSynchronize(stream));
  REQUIRE(host[0] == 2);
}

TEST_CASE("a host that overwrites pinned memory too early copies the wrong values", "[cuda][emulator]") {
  TestStream stream;
  DeviceArray<float> x(n);
  Pinned host(n, 1);
  CUDA_CHECK(cudaMemcpyAsync(x, host, bytes, cudaMemcpyHostToDevice, stream));
  host[0] = 2;
  REQUIRE(x.host()[0] == 2);
}

#endif

TEST_CASE("copies from pageable memory are staged, and copies to it block", "[cuda][emulator]") {
  TestStream stream;
  DeviceArray<float> x(n);
  std::vector<float> from(n, 1.0f), to(n);
  CUDA_CHECK(cudaMemcpyAsync(x, from.data(), bytes, cudaMemcpyHostToDevice, stream));
  from[0] = 2;
  add(stream, x, x);
  CUDA_CHECK(cudaMemcpyAsync(to.data(), x, bytes, cudaMemcpyDeviceToHost, stream));
  REQUIRE(to[0] == 2);
}

// ---- Bugs that a sanitizer reports: each is a hidden test case, run by this program again ---------------------------

#ifdef __SANITIZE_THREAD__

TEST_CASE("planted: the host reads too early", "[.planted]") {
  TestStream stream;
  DeviceArray<float> x(counted(n));
  Pinned host(n);
  CUDA_CHECK(cudaMemcpyAsync(host, x, bytes, cudaMemcpyDeviceToHost, stream));
  CUDA_CHECK(cudaDeviceSynchronize());
  CUDA_CHECK(cudaMemcpyAsync(host, x, bytes, cudaMemcpyDeviceToHost, stream));
  REQUIRE(host[0] == 1);
  CUDA_CHECK(cudaStreamSynchronize(stream));
}
TEST_CASE("planted: the host overwrites too early", "[.planted]") {
  TestStream stream;
  DeviceArray<float> x(n);
  Pinned host(n, 1);
  CUDA_CHECK(cudaMemcpyAsync(x, host, bytes, cudaMemcpyHostToDevice, stream));
  host[0] = 2;
  CUDA_CHECK(cudaStreamSynchronize(stream));
}
TEST_CASE("planted: one rank does not wait for the event of another", "[.planted]") {
  const Devices devices(2);
  DeviceArray<float> x(counted(n));
  TestStream stream;
  add(stream, x, x);
  std::thread([&] {
    CUDA_CHECK(cudaSetDevice(1));
    TestStream other;
    DeviceArray<float> y(n);
    CUDA_CHECK(cudaMemcpyAsync(y, x, bytes, cudaMemcpyDeviceToDevice, other));
    CUDA_CHECK(cudaStreamSynchronize(other));
  }).join();
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

TEST_CASE("ThreadSanitizer ends the program where a host or another device does not wait", "[cuda][emulator]") {
  for (const char* bug : {"the host reads too early", "the host overwrites too early",
                          "one rank does not wait for the event of another"}) {
    INFO(bug);
    REQUIRE_THAT(output_of_failing(std::string("planted: ") + bug),
                 ContainsSubstring("ThreadSanitizer: data race") && ContainsSubstring("test_emulator_runtime.cpp:"));
  }
}

namespace {

// d = a b by cuBLASLt, matrices (8, 8) of fp32.
void multiply(cudaStream_t stream, float* d, const float* a, const float* b) {
  const auto check = [](cublasStatus_t status) { REQUIRE(status == CUBLAS_STATUS_SUCCESS); };
  cublasLtHandle_t library = nullptr;
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t matrix = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  const float alpha = 1, beta = 0;
  check(cublasLtCreate(&library));
  check(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  check(cublasLtMatrixLayoutCreate(&matrix, CUDA_R_32F, 8, 8, 8));
  check(cublasLtMatmulPreferenceCreate(&preference));  // no workspace
  check(cublasLtMatmulAlgoGetHeuristic(library, operation, matrix, matrix, matrix, matrix, preference, 1, &found,
                                       &count));
  REQUIRE(count == 1);
  check(cublasLtMatmul(library, operation, &alpha, a, matrix, b, matrix, &beta, d, matrix, d, matrix, &found.algo,
                       nullptr, 0, stream));
  check(cublasLtMatmulPreferenceDestroy(preference));
  check(cublasLtMatrixLayoutDestroy(matrix));
  check(cublasLtMatmulDescDestroy(operation));
  check(cublasLtDestroy(library));
}

// A kernel writes the matrix of this name of a product in another stream, or reads D; with a wait between them or
// without.
template <char matrix, bool waits>
void beside_product() {
  TestStream one, other;
  TestEvent event;
  DeviceArray<float> x(counted(n)), y(counted(n)), z(n);
  matrix == 'D' ? multiply(one, x, y, y) : add(one, x, y);
  CUDA_CHECK(cudaEventRecord(event, one));
  if (waits) CUDA_CHECK(wait_event(other, event));
  if (matrix == 'A') multiply(other, z, x, y);
  if (matrix == 'B') multiply(other, z, y, x);
  if (matrix == 'D') add(other, z, x);
  CUDA_CHECK(cudaDeviceSynchronize());
}

}  // namespace

TEST_CASE("planted: a product reads A too early", "[.planted]") { beside_product<'A', false>(); }
TEST_CASE("planted: a product reads B too early", "[.planted]") { beside_product<'B', false>(); }
TEST_CASE("planted: D of a product is read too early", "[.planted]") { beside_product<'D', false>(); }

TEST_CASE("ThreadSanitizer ends the program at races with a product", "[cuda][emulator]") {
  beside_product<'A', true>();
  beside_product<'B', true>();
  beside_product<'D', true>();
  for (const char* bug :
       {"a product reads A too early", "a product reads B too early", "D of a product is read too early"}) {
    INFO(bug);
    REQUIRE_THAT(output_of_failing(std::string("planted: ") + bug), ContainsSubstring("ThreadSanitizer: data race"));
  }
}

#elif defined(__SANITIZE_ADDRESS__)

TEST_CASE("planted: a copy to host memory that is too small", "[.planted]") {
  DeviceArray<float> x(counted(n));
  const auto to = std::make_unique<float[]>(n - 1);
  CUDA_CHECK(cudaMemcpy(to.get(), x, bytes, cudaMemcpyDeviceToHost));
}
TEST_CASE("planted: a kernel uses memory of another device", "[.planted]") {
  const Devices devices(2);
  DeviceArray<float> x(counted(n));
  CUDA_CHECK(cudaSetDevice(1));
  DeviceArray<float> y(n);
  add(nullptr, y, x);
  CUDA_CHECK(cudaDeviceSynchronize());
}

TEST_CASE("AddressSanitizer ends the program at memory of another device and at bad copies", "[cuda][emulator]") {
  for (const auto& [bug, report] :
       {std::pair{"a copy to host memory that is too small", "AddressSanitizer: heap-buffer-overflow"},
        std::pair{"a kernel uses memory of another device", "AddressSanitizer: use-after-poison"}}) {
    INFO(bug);
    REQUIRE_THAT(output_of_failing(std::string("planted: ") + bug), ContainsSubstring(report));
  }
}

#endif
