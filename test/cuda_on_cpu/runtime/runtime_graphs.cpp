// runtime_graphs.cpp: stream capture and graphs. A launched graph is one task of its stream; its nodes run in any order
// that their dependencies allow, as the schedule chooses.
#include <algorithm>

#include "cuda_on_cpu/runtime/runtime.h"

namespace cuda_on_cpu::detail {

struct Capture {
  CUstream_st* origin;  // null: the capture has ended
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  bool spoilt = false;
  Graph graph;
  std::vector<CUstream_st*> streams;  // by lane; the origin first
};

// ThreadSanitizer's contexts: work captured from different streams is as concurrent as these.
struct Lanes {
  explicit Lanes(int count) {
    for (int i = 0; i < count; ++i) contexts.push_back(create_context());
  }
  ~Lanes() {
    for (void* context : contexts) destroy_context(context);
  }
  std::vector<void*> contexts;
};

namespace {

cudaError_t spoil(Capture& capture, cudaError_t error) {
  capture.spoilt = true;
  return note(error);
}

void add(std::vector<int>& nodes, const std::vector<int>& more) {
  for (const int node : more)
    if (std::count(nodes.begin(), nodes.end(), node) == 0) nodes.push_back(node);
}

// Does the end of the origin stream depend on everything captured?
bool all_joined(const Capture& capture) {
  std::vector<bool> joined(capture.graph.nodes.size());
  std::vector<int> open = capture.origin->tail;
  while (!open.empty()) {
    const auto node = static_cast<size_t>(open.back());
    open.pop_back();
    if (joined[node]) continue;
    joined[node] = true;
    const auto& after = capture.graph.nodes[node].after;
    open.insert(open.end(), after.begin(), after.end());
  }
  return std::all_of(joined.begin(), joined.end(), [](bool each) { return each; });
}

}  // namespace

static void end_capture(const std::shared_ptr<Capture>& capture) {
  std::erase(runtime().captures, capture);
  capture->origin = nullptr;
  for (CUstream_st* stream : capture->streams) {
    stream->capture = nullptr;
    stream->tail.clear();
  }
}
void leave_capture(CUstream_st& stream) {
  const std::shared_ptr<Capture> capture = stream.capture;
  capture->spoilt = true;
  if (capture->origin == &stream) return end_capture(capture);
  stream.capture = nullptr;
  std::erase(capture->streams, &stream);
}

bool is_capturing(const CUstream_st& stream) { return stream.capture != nullptr; }

cudaError_t refuse_capture(CUstream_st& stream) { return spoil(*stream.capture, cudaErrorStreamCaptureUnsupported); }
cudaError_t refuse_captured(CUevent_st& event) { return spoil(*event.capture, cudaErrorCapturedEvent); }

cudaError_t check_unsafe_call() {
  cudaError_t error = cudaSuccess;
  for (const auto& capture : runtime().captures) {
    const bool mine = capture->thread == std::this_thread::get_id();
    if (capture->mode == cudaStreamCaptureModeGlobal || (mine && capture->mode == cudaStreamCaptureModeThreadLocal))
      error = spoil(*capture, cudaErrorStreamCaptureUnsupported);
  }
  return error;
}
cudaError_t check_device_wait(const Device& device) {
  cudaError_t error = check_unsafe_call();
  for (CUstream_st* stream : device.streams)
    if (is_capturing(*stream)) error = refuse_capture(*stream);
  return error;
}
cudaError_t check_implicit(const CUstream_st& stream) {
  cudaError_t error = cudaSuccess;
  if (stream.number != 0) return error;
  for (const auto& capture : runtime().captures)
    for (const CUstream_st* each : capture->streams)
      if (each->device == stream.device && (each->flags & cudaStreamNonBlocking) == 0)
        error = spoil(*capture, cudaErrorStreamCaptureImplicit);
  return error;
}

cudaError_t capture(CUstream_st& stream, Work work) {
  Capture& capture = *stream.capture;
  if (capture.spoilt) return note(cudaErrorStreamCaptureInvalidated);
  auto& nodes = capture.graph.nodes;
  const auto lane = std::find(capture.streams.begin(), capture.streams.end(), &stream) - capture.streams.begin();
  const int node = static_cast<int>(nodes.size());
  for (const int before : stream.tail) nodes[static_cast<size_t>(before)].followers.push_back(node);
  nodes.push_back({std::make_shared<Work>(std::move(work)), stream.device, static_cast<int>(lane), stream.tail, {}});
  stream.tail.assign(1, node);
  return cudaSuccess;
}
cudaError_t capture_record(CUevent_st& event, CUstream_st& stream) {
  if (stream.capture->spoilt) return note(cudaErrorStreamCaptureInvalidated);
  event.mark = nullptr;
  event.capture = stream.capture;
  event.tail = stream.tail;
  return cudaSuccess;
}
// Between a stream and an event of which at least one is in a capture. A stream that waits for a captured event joins
// the capture.
cudaError_t capture_wait(CUstream_st& stream, CUevent_st& event) {
  if (event.capture == nullptr) return spoil(*stream.capture, cudaErrorStreamCaptureIsolation);
  if (event.capture->origin == nullptr)
    return is_capturing(stream) ? spoil(*stream.capture, cudaErrorCapturedEvent) : note(cudaErrorCapturedEvent);
  if (event.capture->spoilt) return note(cudaErrorStreamCaptureInvalidated);
  if (stream.number == 0) return spoil(*event.capture, cudaErrorStreamCaptureImplicit);
  if (!is_capturing(stream)) {
    stream.capture = event.capture;
    stream.capture->streams.push_back(&stream);
  } else if (stream.capture != event.capture) {
    spoil(*stream.capture, cudaErrorStreamCaptureMerge);
    return spoil(*event.capture, cudaErrorStreamCaptureMerge);
  }
  add(stream.tail, event.tail);
  return cudaSuccess;
}

}  // namespace cuda_on_cpu::detail

using namespace cuda_on_cpu::detail;

// ---- Capture --------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Lock lock;
  CUstream_st& s = stream_of(stream);
  if (s.number == 0) return note(cudaErrorStreamCaptureUnsupported);
  if (is_capturing(s)) return note(cudaErrorIllegalState);
  s.capture = std::make_shared<Capture>(Capture{&s, mode, std::this_thread::get_id(), false, {}, {&s}});
  runtime().captures.push_back(s.capture);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Lock lock;
  CUstream_st& s = stream_of(stream);
  *graph = nullptr;
  if (!is_capturing(s)) return note(cudaErrorIllegalState);
  const std::shared_ptr<Capture> capture = s.capture;
  if (capture->origin != &s) return spoil(*capture, cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return spoil(*capture, cudaErrorStreamCaptureWrongThread);
  const bool joined = all_joined(*capture);
  end_capture(capture);
  if (capture->spoilt) return note(cudaErrorStreamCaptureInvalidated);
  if (!joined) return note(cudaErrorStreamCaptureUnjoined);
  capture->graph.lanes = static_cast<int>(capture->streams.size());
  *graph = new CUgraph_st{std::make_shared<Graph>(std::move(capture->graph))};
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Lock lock;
  const CUstream_st& s = stream_of(stream);
  *status = !is_capturing(s)    ? cudaStreamCaptureStatusNone
            : s.capture->spoilt ? cudaStreamCaptureStatusInvalidated
                                : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

// ---- Graphs ---------------------------------------------------------------------------------------------------------

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  Lock lock;
  auto& all = graph->graph->nodes;
  for (size_t i = 0; nodes != nullptr && i < *count; ++i) nodes[i] = i < all.size() ? &all[i] : nullptr;
  *count = nodes == nullptr ? all.size() : std::min(*count, all.size());
  return cudaSuccess;
}
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  *type = node->work->type;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  Lock lock;
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  Lock lock;
  *executable = new CUgraphExec_st{graph->graph, std::make_shared<Lanes>(graph->graph->lanes), nullptr};
  return cudaSuccess;
}
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t executable, cudaGraph_t graph, cudaGraphExecUpdateResultInfo* result) {
  Lock lock;
  auto& nodes = graph->graph->nodes;
  const auto& old = executable->graph->nodes;
  *result = {nodes.size() == old.size() ? cudaGraphExecUpdateSuccess : cudaGraphExecUpdateErrorTopologyChanged, nullptr,
             nullptr};
  for (size_t i = 0; i < nodes.size() && result->result == cudaGraphExecUpdateSuccess; ++i) {
    if (nodes[i].after != old[i].after) *result = {cudaGraphExecUpdateErrorTopologyChanged, &nodes[i], nullptr};
    else if (nodes[i].work->type != old[i].work->type)
      *result = {cudaGraphExecUpdateErrorNodeTypeChanged, &nodes[i], nullptr};
  }
  if (result->result != cudaGraphExecUpdateSuccess) return note(cudaErrorGraphExecUpdateFailure);
  if (graph->graph->lanes != executable->graph->lanes) executable->lanes = std::make_shared<Lanes>(graph->graph->lanes);
  executable->graph = graph->graph;
  return cudaSuccess;
}
// Launches of the same executable run one after another.
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  Lock lock;
  CUstream_st& s = stream_of(stream);
  if (is_capturing(s)) throw cuda_on_cpu::Failure("cudaGraphLaunch: a graph within a graph is not emulated");
  if (const cudaError_t error = check_implicit(s); error != cudaSuccess) return error;
  const auto& nodes = executable->graph->nodes;
  auto run = std::make_unique<GraphRun>();
  run->graph = executable->graph;
  run->lanes = executable->lanes;
  run->left = nodes.size();
  run->nodes.resize(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) {
    Task& task = run->nodes[i];
    task.work = nodes[i].work;
    task.device = nodes[i].device;
    task.stream = &s;
    task.run = run.get();
    task.node = static_cast<int>(i);
    task.context = run->lanes->contexts[static_cast<size_t>(nodes[i].lane)];
    run->missing.push_back(static_cast<int>(nodes[i].after.size()));
    if (nodes[i].after.empty()) run->ready.insert(task.node);
  }
  Task launch{.mark = std::make_shared<Mark>(), .graph = std::move(run)};
  launch.mark->stream = &s;
  if (executable->last != nullptr) launch.after.push_back(executable->last);
  executable->last = launch.mark;
  enqueue(s, std::move(launch));
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  Lock lock;
  delete executable;
  return cudaSuccess;
}
