// interpreter.h: runs lists of actions (schedule/actions.h): the only place that runs forward and backward. It gives
// every micro-batch in flight a slot of activations, uploads inputs, says which units will be needed, and launches
// repeated work as CUDA graphs. stage.h has the computation of each action.
#pragma once
#include "train/stage.h"

namespace llmc {

class Interpreter {
 public:
  Interpreter(const StepConfig& config, const Context& context, ModelState& state, Stage& stage)
      : config_(config),
        context_(context),
        state_(state),
        stage_(stage),
        chunks_here_(stage.chunks()),
        uploads_(config, context) {
    for (size_t c = 0; c < chunks_here_.size(); ++c)
      if (!stage_.is_here(static_cast<int>(c))) chunks_here_[c] = {};
  }

  // Enqueues all actions on the compute stream, and messages on those of the links. batches: the inputs.
  void run(const std::vector<Action>& actions, const Pass& pass, const BatchSource& batches) {
    auto scope = context_.arena.scope();
    std::optional<Arena::Scope> at_host;
    if (context_.host != nullptr) at_host.emplace(*context_.host);
    OpenPass open = begin(actions, pass);
    if (pass.purpose == Purpose::generate) open.logits = stage_.head_pass().logits_room();
    if (state_.weights.sharded())
      state_.weights.start_pass(
          units_acquired(actions, pass.purpose), context_.compute,
          pass.purpose == Purpose::train ? GatheredWeights::Travel::as_trained : GatheredWeights::Travel::as_stored);
    for (const Action& action : actions) {
      const double begin = context_.compute.seconds();
      enqueue(action, open, batches);
      if (action_times_ != nullptr) action_times_->push_back({begin, context_.compute.seconds()});
    }
    if (state_.groups().stages() > 1) read_headers();
    if (pass.purpose != Purpose::generate) return;
    const Groups& groups = state_.groups();
    if (groups.stages() > 1) {  // broadcast from a rank that has the head
      const int head = config_.pipeline().stage_of(config_.layout.pipeline.chunks() - 1);
      groups[GroupName::scalars].broadcast(open.logits, head * groups.ranks_of_stage(), context_.compute);
    }
    stage_.head_pass().deliver_logits(open.logits);
  }

  // A pass whose actions are enqueued one by one.
  struct OpenPass {
    Pass pass;
    PassMemory memory;
    int64_t uploaded = 0;  // micro-batches
    Tensor logits = {};    // of Purpose::generate
  };
  // Begins a pass, with room for as many micro-batches in flight as these actions have; the caller opens a scope of the
  // arena. period: after this many micro-batches the use of memory repeats; 0: it does not
  OpenPass begin(const std::vector<Action>& actions, const Pass& pass, int64_t period = 0) {
    PassMemory memory(config_, chunks_here_, actions, pass, context_.arena, period, context_.host);
    reserve_messages(actions, pass, memory);
    stage_.begin_pass();
    if (pass.purpose == Purpose::train) state_.weights.begin_step();
    return {pass, std::move(memory)};
  }
  void enqueue(const Action& action, OpenPass& open, const BatchSource& batches) {
    const Pass& pass = open.pass;
    action_ = action;
    if (!computes(action.kind)) return pass_message(action, open.memory);
    if (action.kind == ActionKind::forward && action.micro_batch == open.uploaded) {
      upload(action.micro_batch, open.memory, pass, batches(action.micro_batch));
      ++open.uploaded;
    }
    take_message(action, open.memory);
    const StreamRange range(context_.compute, [&] { return action_span(action, config_.pipeline()); });
    if (replayable(action, pass)) replay(action, open);
    else compute(action, open);
  }

  // Reads the headers of the messages taken so far, for take_headers(): whoever waits for the results checks them.
  void read_headers() { headers_.push_back(state_.groups().links.read_headers(context_.compute)); }
  std::vector<ReceivedHeaders> take_headers() { return std::exchange(headers_, {}); }

  // On the null device: appends when the compute stream begins and ends each action (until nullptr is set).
  void time_actions(std::vector<PassTime>* times) { action_times_ = times; }

  struct Place {
    std::string what;          // "forward of blocks.3"
    int64_t micro_batch = -1;  // -1: none
    int slice = 0;
    int64_t turn = -1;  // place of this pass among all forwards, then all backwards, of the micro-batch
  };
  Place place() const {
    const int64_t passes = config_.slices_for(Purpose::train) * config_.layout.pipeline.chunks(),
                  pass = int64_t{action_.slice} * config_.layout.pipeline.chunks() + action_.chunk;
    return {stage_.current(), action_.micro_batch, action_.slice,
            goes_forward(action_.kind) ? pass : 2 * passes - 1 - pass};
  }

 private:
  void upload(int64_t micro_batch, const PassMemory& memory, const Pass& pass, HostBatch all) {
    const int context_rank = state_.groups().me.context;
    if (config_.slices_for(pass.purpose) == 1)
      return uploads_.upload_batch(memory.inputs(micro_batch, 0), std::move(all), pass.shape, pass.purpose,
                                   context_rank, context_);
    for (int k = 0; k < config_.slices_for(pass.purpose); ++k)
      uploads_.upload_batch(memory.inputs(micro_batch, k), slice_of(all, pass.shape.B, config_.slice_rows(k)),
                            config_.share(pass.shape, pass.purpose, k), pass.purpose, context_rank, context_);
  }

  void compute(const Action& a, const OpenPass& open) {
    Slot slot = open.memory.slot(a);
    stage_.place(slot, a.kind);
    if (a.kind == ActionKind::forward) return stage_.forward(a.chunk, slot, open.pass, a.micro_batch, open.logits);
    if (a.kind == ActionKind::backward_weight) return stage_.backward_weight(a.chunk, slot, is_last(a));
    stage_.backward(a.chunk, slot, open.pass, is_last(a));
  }
  // By Stream::replayed(): on a GPU as a CUDA graph, from the second time on.
  void replay(const Action& a, const OpenPass& open) {
    state_.weights.settle(context_.compute);                                 // a graph waits for no other stream
    const bool first = a.kind != ActionKind::forward && a.micro_batch == 0;  // writes gradients, does not add
    const std::byte *tokens = nullptr, *input = nullptr;
    if (!on_paper()) {
      tokens = open.memory.inputs(a.micro_batch, a.slice).tokens.bytes;
      input = open.memory.input(a).bytes;
    }
    context_.compute.replayed(replays_[{a.kind, a.chunk, a.slice, first, tokens, input}], [&] { compute(a, open); });
    if (is_backward(a.kind)) stage_.gradients_written(a.chunk);
  }

  // ---- Messages between stages -------------------------------------------------------------------------------------

  int stage_of(int chunk) const { return config_.pipeline().stage_of(chunk); }
  // The header of a message that an action sends, receives or has as its input: activations or gradients of `chunk`.
  static MessageHeader header_of(int chunk, const Action& a) {
    return {goes_forward(a.kind) ? 0.0 : 1.0, static_cast<double>(chunk), static_cast<double>(a.micro_batch),
            static_cast<double>(a.slice)};
  }

  // Makes room for the messages of each link: two to send, and as many as arrive before they are used.
  void reserve_messages(const std::vector<Action>& actions, const Pass& pass, const PassMemory& memory) {
    Groups& groups = state_.groups();
    if (groups.stages() == 1) return;
    int64_t elements = 0;  // of the largest slice
    for (int k = 0; k < config_.slices_for(pass.purpose); ++k)
      elements = std::max(elements, memory.stream_shape(k).numel());
    struct Waiting {
      int64_t now = 0, most = 0;
    };
    std::set<int> to;             // stages
    std::map<int, Waiting> from;  // messages of each stage
    for (const Action& a : actions) {
      if (is_send(a.kind)) to.insert(stage_of(chunk_after(a)));
      const int before = comes_from(a);
      if (before < 0) continue;
      Waiting& waiting = from[before];
      waiting.now += is_receive(a.kind) ? 1 : -1;
      waiting.most = std::max(waiting.most, waiting.now);
    }
    groups.links.reserve_headers(context_.arena);
    const DType dtype = config_.precision.activations;
    for (const int s : to) groups.links.to(s).reserve(dtype, elements, 2, context_.arena);
    for (const auto& [s, waiting] : from)
      groups.links.from(s).reserve(dtype, elements, waiting.most + 1, context_.arena);
  }
  // The stage from which an action gets a message, or receives it; -1: none.
  int comes_from(const Action& a) const {
    const bool has_input = a.kind == ActionKind::forward || is_backward(a.kind) || is_receive(a.kind);
    const int other = chunk_before(a);
    return has_input && config_.pipeline().elsewhere(a.chunk, other) ? stage_of(other) : -1;
  }
  void pass_message(const Action& a, const PassMemory& memory) {
    StageLinks& links = state_.groups().links;
    const int64_t elements = memory.stream_shape(a.slice).numel();
    CHECK(is_send(a.kind) || is_receive(a.kind), "the interpreter runs no {}: pipedream.h makes updates", a.kind);
    if (is_receive(a.kind)) return links.from(comes_from(a)).post(header_of(chunk_before(a), a), elements);
    links.to(stage_of(chunk_after(a)))
        .send(goes_forward(a.kind) ? memory.output(a) : memory.gradient(a.slice), header_of(a.chunk, a),
              context_.compute);
  }
  void take_message(const Action& a, const PassMemory& memory) {
    const int from = comes_from(a);
    if (from < 0) return;
    StageLinks& links = state_.groups().links;
    if (!links.has_room_for_header()) read_headers();
    links.take(from, a.kind == ActionKind::forward ? memory.input(a) : memory.gradient(a.slice),
               header_of(chunk_before(a), a), context_.compute);
  }

  std::vector<size_t> units_acquired(const std::vector<Action>& actions, Purpose purpose) const {
    std::vector<size_t> units;
    for (const Action& action : actions)
      if (action.kind == ActionKind::forward || is_backward(action.kind))
        for (const size_t u : stage_.units_acquired(action, purpose)) units.push_back(u);
    return units;
  }

  // Whether the action belongs to the last micro-batch of a step; an asynchronous step has only one.
  bool is_last(const Action& action) const {
    return config_.layout.pipeline.asynchronous() || action.micro_batch + 1 == config_.micro_batches;
  }

  bool on_paper() const { return context_.compute.device().kind == DeviceKind::null; }
  // Whether the action enqueues the same work every time, and only on the compute stream. It does not if it waits for
  // other streams, or they for it, or if it exchanges activations or rows of experts. On paper messages between stages,
  // which are actions of their own, do not matter.
  bool replayable(const Action& action, const Pass& pass) const {
    if (pass.purpose != Purpose::train || pass.launch == Launch::enqueue) return false;
    const Layout& l = config_.layout;
    if (config_.keeps_at_host(pass.purpose) || l.zero.stage == 3 || l.zero.grad_reduce == GradReduce::micro)
      return false;
    if (l.tensor.ranks > 1 || l.context.ranks > 1 || l.expert.ranks > 1) return false;
    // The first forward after an update waits for the weights of each unit as it comes to it.
    if (action.kind == ActionKind::forward && action.micro_batch == 0 && state_.weights.arriving()) return false;
    if (l.pipeline.stages > 1) return on_paper() && !is_last(action);
    return action.kind != ActionKind::backward || !is_last(action) || l.zero.ranks() == 1;  // it reduces nothing
  }

  const StepConfig& config_;
  Context context_;
  ModelState& state_;
  Stage& stage_;
  std::vector<Chunk> chunks_here_;  // of the model; those of other stages have no layers
  Uploads uploads_;
  // By kind, chunk, slice, whether it is the first micro-batch's backward and, but for paper, the addresses of inputs.
  std::map<std::tuple<ActionKind, int, int, bool, const std::byte*, const std::byte*>, Replay> replays_;
  std::vector<ReceivedHeaders> headers_;  // not yet taken
  std::vector<PassTime>* action_times_ = nullptr;
  Action action_ = {ActionKind::forward, 0, -1};  // the action that is being enqueued
};

}  // namespace llmc
