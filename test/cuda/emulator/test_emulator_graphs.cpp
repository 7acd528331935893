// The emulated CUDA runtime: graphs from stream capture.
#include <thread>

#include "cuda/emulator/emulator_test.h"

using namespace llmc;
using namespace planted;

namespace {

constexpr int n = 64;
constexpr size_t bytes = n * sizeof(float);

void add(cudaStream_t stream, float* out, const float* x) { launch(add_one<Bug::none>, 1, 32, 0, stream, out, x, n); }

// Captures the call of `f` on a stream.
template <class F>
cudaGraph_t captured(cudaStream_t stream, F&& f) {
  cudaGraph_t graph = nullptr;
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  try {
    f();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    throw;
  }
  CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  return graph;
}
template <class F>
cudaGraphExec_t executable(cudaStream_t stream, F&& f) {
  const cudaGraph_t graph = captured(stream, f);
  cudaGraphExec_t made = nullptr;
  CUDA_CHECK(cudaGraphInstantiate(&made, graph));
  CUDA_CHECK(cudaGraphDestroy(graph));
  return made;
}

// Two streams pass an array back and forth within a graph, which is launched twice.
template <bool wait_forth, bool wait_back>
Outputs run_fork_and_join() {
  TestStream a, b;
  TestEvent fork, forth, back, join;
  DeviceArray<float> w(counted(n)), x(counted(n)), y(counted(n)), z(counted(n));
  const cudaGraphExec_t graph = executable(a, [&] {
    CUDA_CHECK(cudaEventRecord(fork, a));
    CUDA_CHECK(cudaStreamWaitEvent(b, fork));  // b becomes part of the capture
    add(b, w, w);
    add(a, y, x);
    CUDA_CHECK(cudaEventRecord(forth, a));
    if (wait_forth) CUDA_CHECK(cudaStreamWaitEvent(b, forth));  // y is written
    add(b, x, y);
    CUDA_CHECK(cudaEventRecord(back, b));
    if (wait_back) CUDA_CHECK(cudaStreamWaitEvent(a, back));  // y is read
    add(a, y, y);
    add(b, z, x);
    CUDA_CHECK(cudaEventRecord(join, b));
    CUDA_CHECK(cudaStreamWaitEvent(a, join));  // b has joined
  });
  CUDA_CHECK(cudaGraphLaunch(graph, a));
  CUDA_CHECK(cudaGraphLaunch(graph, a));
  add(a, z, z);  // after the graph
  CUDA_CHECK(cudaStreamSynchronize(a));
  CUDA_CHECK(cudaGraphExecDestroy(graph));
  return {{"w", w.host()}, {"x", x.host()}, {"y", y.host()}, {"z", z.host()}};
}

}  // namespace

TEST_CASE("a captured graph does what its streams would do", "[cuda][emulator]") {
  std::vector<float> w = counted(n), x = w, y = w, z = w;
  for (size_t i = 0; i < n; ++i) w[i] += 2, x[i] += 4, y[i] += 4, z[i] += 6;
  check_kernel(run_fork_and_join<true, true>, {{"w", w}, {"x", x}, {"y", y}, {"z", z}}, 1e-30);
}

#ifndef __SANITIZE_THREAD__  // which ends the program at these bugs

TEST_CASE("a missing wait for an event shows under some schedule when it was captured", "[cuda][emulator]") {
  REQUIRE(differs(run_fork_and_join<false, true>, run_fork_and_join<true, true>()));
  REQUIRE(differs(run_fork_and_join<true, false>, run_fork_and_join<true, true>()));
}

#endif

TEST_CASE("waits disabled during graph capture are detected", "[cuda][emulator]") {
  check_barriers(run_fork_and_join<true, true>);
}

TEST_CASE("captured work runs only when the graph is launched, with the arguments of its capture", "[cuda][emulator]") {
  TestStream stream;
  DeviceArray<float> x(counted(n)), y(n);
  Pinned host(n, 0);
  float* out = y;
  const cudaGraphExec_t graph = executable(stream, [&] {
    cudaStreamCaptureStatus status;
    REQUIRE((cudaStreamIsCapturing(stream, &status) == cudaSuccess && status == cudaStreamCaptureStatusActive));
    add(stream, out, x);
    out = nullptr;
    CUDA_CHECK(cudaMemcpyAsync(host, y, bytes, cudaMemcpyDeviceToHost, stream));
  });
  cudaStreamCaptureStatus status;
  REQUIRE((cudaStreamIsCapturing(stream, &status) == cudaSuccess && status == cudaStreamCaptureStatusNone));
  CUDA_CHECK(cudaStreamSynchronize(stream));
  REQUIRE(host[0] == 0);
  CUDA_CHECK(cudaGraphLaunch(graph, stream));
  CUDA_CHECK(cudaGraphExecDestroy(graph));  // the pending launch continues
  CUDA_CHECK(cudaStreamSynchronize(stream));
  REQUIRE(host[0] == 2);
}

TEST_CASE("launches of one executable run one after another on any streams", "[cuda][emulator]") {
  const auto run = []() -> Outputs {
    TestStream a, b;
    DeviceArray<float> x(counted(n)), y(n);
    const cudaGraphExec_t graph = executable(a, [&] {
      add(a, y, x);
      add(a, x, y);
    });
    for (const cudaStream_t stream : {cudaStream_t(a), cudaStream_t(b), cudaStream_t(a)})
      CUDA_CHECK(cudaGraphLaunch(graph, stream));
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaGraphExecDestroy(graph));
    return {{"x", x.host()}};
  };
  std::vector<float> right = counted(n);
  for (float& x : right) x += 6;
  check_kernel(run, {{"x", right}}, 1e-30);
}

TEST_CASE("a graph has the captured nodes, and can be updated with new arguments but not a new topology",
          "[cuda][emulator]") {
  TestStream stream;
  DeviceArray<float> x(counted(n)), y(n), z(n);
  const auto capture = [&](float* out, bool more) {
    return captured(stream, [&] {
      CUDA_CHECK(cudaMemsetAsync(out, 0, bytes, stream));
      add(stream, out, x);
      if (more) add(stream, out, x);
    });
  };
  const cudaGraph_t graph = capture(y, false), other = capture(z, false), longer = capture(z, true);
  size_t count = 0;
  REQUIRE((cudaGraphGetNodes(graph, nullptr, &count) == cudaSuccess && count == 2));
  cudaGraphNode_t nodes[2];
  cudaGraphNodeType types[2];
  REQUIRE(cudaGraphGetNodes(graph, nodes, &count) == cudaSuccess);
  for (size_t i = 0; i < 2; ++i) REQUIRE(cudaGraphNodeGetType(nodes[i], &types[i]) == cudaSuccess);
  REQUIRE((types[0] == cudaGraphNodeTypeMemset && types[1] == cudaGraphNodeTypeKernel));

  cudaGraphExec_t made = nullptr;
  cudaGraphExecUpdateResultInfo result;
  CUDA_CHECK(cudaGraphInstantiate(&made, graph));
  CUDA_CHECK(cudaGraphLaunch(made, stream));
  CUDA_CHECK(cudaGraphExecUpdate(made, other, &result));
  CUDA_CHECK(cudaGraphLaunch(made, stream));
  REQUIRE(y.host()[0] == 2);
  REQUIRE(z.host()[0] == 2);
  REQUIRE(cudaGraphExecUpdate(made, longer, &result) == cudaErrorGraphExecUpdateFailure);
  REQUIRE(result.result == cudaGraphExecUpdateErrorTopologyChanged);
  for (const cudaGraph_t each : {graph, other, longer}) CUDA_CHECK(cudaGraphDestroy(each));
  CUDA_CHECK(cudaGraphExecDestroy(made));
  cudaGetLastError();
}

// ---- What CUDA refuses ----------------------------------------------------------------------------------------------

TEST_CASE("work that cannot be captured is refused and invalidates the capture", "[cuda][emulator]") {
  TestStream stream, other;
  TestEvent before, inside;
  DeviceArray<float> x(counted(n)), y(n);
  CUDA_CHECK(cudaEventRecord(before, other));
  std::vector<float> pageable(n);
  const auto after = [&](auto&& f, cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) {
    cudaGraph_t graph = nullptr;
    CUDA_CHECK(cudaStreamBeginCapture(stream, mode));
    add(stream, y, x);
    CUDA_CHECK(cudaEventRecord(inside, stream));
    const cudaError_t error = f();
    cudaStreamCaptureStatus status;
    CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    const cudaError_t end = cudaStreamEndCapture(stream, &graph);
    CHECK((end == cudaSuccess) == (graph != nullptr));
    CHECK((status == cudaStreamCaptureStatusActive) == (end != cudaErrorStreamCaptureInvalidated));
    if (graph != nullptr) CUDA_CHECK(cudaGraphDestroy(graph));
    cudaGetLastError();
    return std::pair(error, end);
  };
  const auto refused = [](cudaError_t error) { return std::pair(error, cudaErrorStreamCaptureInvalidated); };
  const std::pair taken(cudaSuccess, cudaSuccess);
  const auto unsupported = refused(cudaErrorStreamCaptureUnsupported);
  CHECK(after([] { return cudaSuccess; }) == taken);
  CHECK(after([&] { return cudaStreamSynchronize(stream); }) == unsupported);
  CHECK(after([&] { return cudaStreamQuery(stream); }) == unsupported);
  CHECK(after([&] { return cudaDeviceSynchronize(); }) == unsupported);
  CHECK(after([&] { return cudaEventSynchronize(inside); }) == refused(cudaErrorCapturedEvent));
  CHECK(after([&] { return cudaStreamWaitEvent(stream, before); }) == refused(cudaErrorStreamCaptureIsolation));
  CHECK(after([&] { return cudaMemcpyAsync(pageable.data(), x, bytes, cudaMemcpyDeviceToHost, stream); }) ==
        unsupported);
  // Calls that a capturing thread must not make, except in relaxed mode. Other threads may.
  const auto allocate = [] {
    void* p = nullptr;
    const cudaError_t error = cudaMalloc(&p, 16);
    cudaFree(p);
    return error;
  };
  const auto elsewhere = [&] {
    cudaError_t error = cudaSuccess;
    std::thread([&] { error = allocate(); }).join();
    return error;
  };
  CHECK(after(allocate) == unsupported);
  CHECK(after(elsewhere) == taken);
  CHECK(after(allocate, cudaStreamCaptureModeRelaxed).first == cudaSuccess);
  CHECK(after(elsewhere, cudaStreamCaptureModeGlobal) == unsupported);
  // A stream forked and not joined; a stream of another capture.
  CHECK(after([&] {
          CUDA_CHECK(cudaStreamWaitEvent(other, inside));
          add(other, x, y);
          return cudaSuccess;
        }) == std::pair(cudaSuccess, cudaErrorStreamCaptureUnjoined));
  CHECK(after([&] {
          CUDA_CHECK(cudaStreamWaitEvent(other, inside));
          cudaGraph_t graph = nullptr;
          return cudaStreamEndCapture(other, &graph);
        }) == refused(cudaErrorStreamCaptureUnmatched));
  CHECK(after([&] {
          CUDA_CHECK(cudaStreamBeginCapture(other, cudaStreamCaptureModeThreadLocal));
          const cudaError_t error = cudaStreamWaitEvent(other, inside);
          cudaGraph_t graph = nullptr;
          CHECK(cudaStreamEndCapture(other, &graph) == cudaErrorStreamCaptureInvalidated);
          return error;
        }) == refused(cudaErrorStreamCaptureMerge));
  CHECK(after([&] {
          cudaError_t error = cudaSuccess;
          cudaGraph_t graph = nullptr;
          std::thread([&] { error = cudaStreamEndCapture(stream, &graph); }).join();
          return error;
        }) == refused(cudaErrorStreamCaptureWrongThread));

  CHECK(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeRelaxed) == cudaErrorStreamCaptureUnsupported);
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorIllegalState);
  CHECK(cudaEventQuery(inside) == cudaErrorCapturedEvent);  // its capture has ended
  cudaGetLastError();
}

TEST_CASE("a capture may be abandoned by destroying its streams", "[cuda][emulator]") {
  const Devices devices(1);  // which reports leftover streams
  TestEvent fork;
  for (const bool origin_first : {true, false}) {
    cudaStream_t a, b;
    CUDA_CHECK(cudaStreamCreate(&a));
    CUDA_CHECK(cudaStreamCreate(&b));
    CUDA_CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
    CUDA_CHECK(cudaEventRecord(fork, a));
    CUDA_CHECK(cudaStreamWaitEvent(b, fork));
    CUDA_CHECK(cudaStreamDestroy(origin_first ? a : b));
    CUDA_CHECK(cudaStreamDestroy(origin_first ? b : a));
  }
}

TEST_CASE("the default stream cannot be used while a stream that it waits for is captured", "[cuda][emulator]") {
  for (const unsigned flags : {cudaStreamDefault, cudaStreamNonBlocking}) {
    TestStream stream(flags);
    DeviceArray<float> x(counted(n));
    cudaGraph_t graph = nullptr;
    const bool blocking = flags == cudaStreamDefault;
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    CHECK(cudaMemsetAsync(x, 0, bytes, nullptr) == (blocking ? cudaErrorStreamCaptureImplicit : cudaSuccess));
    CHECK(cudaStreamEndCapture(stream, &graph) == (blocking ? cudaErrorStreamCaptureInvalidated : cudaSuccess));
    if (graph != nullptr) CUDA_CHECK(cudaGraphDestroy(graph));
  }
  cudaGetLastError();
}

// ---- Bugs that a sanitizer reports: each is a hidden test case, run by this program again ---------------------------

#ifdef __SANITIZE_THREAD__

TEST_CASE("planted: missing wait forth in a graph", "[.planted]") { run_fork_and_join<false, true>(); }
TEST_CASE("planted: missing wait back in a graph", "[.planted]") { run_fork_and_join<true, false>(); }

TEST_CASE("ThreadSanitizer ends the program at races within a graph", "[cuda][emulator]") {
  for (const char* bug : {"missing wait forth in a graph", "missing wait back in a graph"}) {
    INFO(bug);
    REQUIRE_THAT(output_of_failing(std::string("planted: ") + bug),
                 ContainsSubstring("ThreadSanitizer: data race") && ContainsSubstring("planted_bugs.h:"));
  }
}

#endif
