// runtime_streams.cpp: streams and events.
#include <algorithm>

#include "cuda_on_cpu/runtime/runtime.h"

using namespace cuda_on_cpu::detail;

void cuda_on_cpu::detail::destroy(CUstream_st* stream) {
  if (is_capturing(*stream)) leave_capture(*stream);
  std::erase(stream->device->streams, stream);
  runtime().streams.erase(stream);
  destroy_context(stream->context);
  delete stream;
}

// ---- Streams --------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  Lock lock;
  Device* device = current_device();
  if (device == nullptr) return no_device();
  *stream = new CUstream_st;
  (*stream)->device = device;
  (*stream)->number = device->streams.back()->number + 1;
  (*stream)->flags = flags;
  device->streams.push_back(*stream);
  runtime().streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Lock lock;
  CUstream_st& s = stream_of(stream);
  if (stream == nullptr) return note(cudaErrorInvalidResourceHandle);
  finish([&] { wait_for_stream(lock, s); });
  destroy(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Lock lock;
  CUstream_st& s = stream_of(stream);
  if (is_capturing(s)) return refuse_capture(s);
  if (const cudaError_t error = check_unsafe_call(); error != cudaSuccess) return error;
  wait_for_stream(lock, s);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Lock lock;
  CUstream_st& s = stream_of(stream);
  if (is_capturing(s)) return refuse_capture(s);
  if (const cudaError_t error = check_unsafe_call(); error != cudaSuccess) return error;
  if (!poll(lock, *s.device, &s, &s, [&s] { return s.tasks.empty(); })) return cudaErrorNotReady;
  cuda_on_cpu::acquire(&s.done);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* argument) {
  Lock lock;
  return submit(stream_of(stream), {.type = cudaGraphNodeTypeHost, .run = [=] {
                                      cuda_on_cpu::Observed observed;
                                      function(argument);
                                    }});
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned, const cuda_on_cpu::Location& where) {
  Lock lock;
  if (cuda_on_cpu::is_switched_off("cudaStreamWaitEvent", where)) return cudaSuccess;
  CUstream_st& s = stream_of(stream);
  if (event->capture != nullptr || is_capturing(s)) return capture_wait(s, *event);
  if (event->mark != nullptr && !(event->mark->reached && !cuda_on_cpu::thread_sanitizer))
    enqueue(s, Task{.after = {event->mark}});
  return cudaSuccess;
}

// ---- Events ---------------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  Lock lock;
  if (current_device() == nullptr) return no_device();
  *event = new CUevent_st{current_device(), flags, nullptr, nullptr, {}};
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
// Existing waits for it remain valid.
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Lock lock;
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Lock lock;
  CUstream_st& s = stream_of(stream);
  if (event->device != s.device)
    throw cuda_on_cpu::Failure("cudaEventRecord: an event of device " + std::to_string(event->device->number) +
                               " is recorded in " + name_of(s));
  if (is_capturing(s)) return capture_record(*event, s);
  event->capture = nullptr;
  event->mark = std::make_shared<Mark>();
  event->mark->stream = &s;
  enqueue(s, Task{.mark = event->mark});
  return cudaSuccess;
}

// A query that is valid only for an event outside captures.
template <class F>
cudaError_t ask(cudaEvent_t event, F&& f) {
  Lock lock;
  if (event->capture != nullptr) return refuse_captured(*event);
  if (const cudaError_t error = check_unsafe_call(); error != cudaSuccess) return error;
  if (event->mark == nullptr) return cudaSuccess;
  const MarkPtr mark = event->mark;
  const cudaError_t error = f(lock, *mark);
  if (error == cudaSuccess) cuda_on_cpu::acquire(&mark->sync);
  return error;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return ask(event, [](Lock& lock, const Mark& mark) {
    if (!mark.reached) wait_until(lock, *mark.stream->device, mark.stream, [&] { return mark.reached; });
    return cudaSuccess;
  });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return ask(event, [](Lock& lock, const Mark& mark) {
    const bool reached = poll(lock, *mark.stream->device, mark.stream, &mark, [&] { return mark.reached; });
    return reached ? cudaSuccess : cudaErrorNotReady;
  });
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  Lock lock;
  for (const cudaEvent_t event : {begin, end})
    if (event->mark == nullptr || (event->flags & cudaEventDisableTiming) != 0)
      return note(cudaErrorInvalidResourceHandle);
  if (!begin->mark->reached || !end->mark->reached) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(end->mark->time - begin->mark->time).count();
  return cudaSuccess;
}
