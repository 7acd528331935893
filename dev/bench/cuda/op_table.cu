// op_table.cu: the time of each op of a training step on this GPU, compared with its roofline (the minimum at the GPU's
// measured rates); `make bench-cuda` runs it. Arguments: build/op_table --help.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "model/presets.h"
#include "op_timer.h"
#include "run/plan/planner.h"

namespace llmc {
namespace {

struct Settings {
  std::vector<std::string> models = {"gpt2:124M", "gpt2:1558M", "qwen2.5:1.5B", "qwen3:30B-A3B"};
  BatchShape batch{16, 1024};
  int64_t repeats = 20, peak_size = 8192, copy_mib = 4096, flush_mib = 0, long_sequence = 4096;
  Operands products = Operands::as_stored;
  std::string json;
};

// The GPU's measured rates: bytes read and written per second, and matmul flops per second.
struct Roofs {
  double bandwidth, matmul;
  double seconds(const OpTime& t) const { return std::max(t.bytes / bandwidth, t.flops / matmul); }
};

constexpr DType dtype = DType::bf16;

// ---- Measurements ---------------------------------------------------------------------------------------------------

Roofs measure_roofs(const Device& device, const OpTimer::Settings& timing, const Settings& settings) {
  const int64_t n = settings.peak_size, half = settings.copy_mib << 18;  // half of the bytes, in bf16
  const std::vector<OpTime> copied = OpTimer::run(device, timing, [&](OpTimer& timer) {
    const Tensor from = timer.normal({half}), to = timer.tensor(dtype, {half});
    timer.measure("", 0, [&] { copy(to, from, timer.stream()); });
  });
  const std::vector<OpTime> multiplied = OpTimer::run(device, timing, [&](OpTimer& timer) {
    const Tensor out = timer.tensor(dtype, {n, n}), x = timer.normal({n, n}), weight = timer.normal({n, n});
    timer.measure("", 0, [&] { linear_forward(out, x, weight, {}, timer.stream()); });
  });
  return {copied[0].bytes / copied[0].fastest, multiplied[0].flops / multiplied[0].fastest};
}

void measure_attention(OpTimer& timer, const AttentionShape& s, double calls) {
  const auto scope = timer.scope();
  Stream& stream = timer.stream();
  const int64_t N = s.B * s.T;
  const Tensor qkv = timer.normal({N, (s.Hq + 2 * s.Hkv) * s.D}), dout = timer.normal({N, s.Hq * s.D});
  const Tensor dqkv = timer.tensor(dtype, qkv.shape), out = timer.tensor(dtype, dout.shape),
               lse = timer.tensor(DType::fp32, {s.B, s.Hq, s.T});
  const std::string shape = formatted("B {} T {} Hq {} Hkv {} D {}", s.B, s.T, s.Hq, s.Hkv, s.D);
  const AttentionBlock block = whole_sequences(s);
  timer.measure(shape, calls, [&] { attention_forward(out, lse, qkv, qkv, {}, block, stream); });
  timer.measure(shape, calls,
                [&] { attention_backward(dqkv, dqkv, dout, out, qkv, qkv, lse, {}, block, Accumulate::no, stream); });
}

// How a linear layer gets its operands: whether its forward keeps the input for the backward, and whether the input and
// the output's gradient come in fp8 from SwiGLU.
struct LinearInputs {
  Operands read = Operands::as_stored;
  bool kept = false, from_swiglu = false, gradient_from_swiglu = false;
};

// out (N, O) = x (N, I) weight^T, and its backward.
// with_dbias: unless another op adds to the bias's gradient.
void measure_linear(OpTimer& timer, const char* name, int64_t N, int64_t O, int64_t I, Bias with_bias, double calls,
                    Bias with_dbias = Bias::yes, const LinearInputs& inputs = {}) {
  using detail::Role, detail::SumAlong;
  const auto scope = timer.scope();
  Stream& stream = timer.stream();
  const Tensor x = timer.normal({N, I}), weight = timer.normal({O, I}, 0.02f), out = timer.normal({N, O});
  const Tensor dweight = timer.filled(0, {O, I});
  Tensor bias, dbias;
  if (with_bias == Bias::yes) bias = timer.normal({O});
  if (with_bias == Bias::yes && with_dbias == Bias::yes) dbias = timer.filled(0, {O});
  const auto in_fp8 = [&](const Tensor& t, Role role) {
    const detail::Quantised q = timer.room_in_fp8(t, role, SumAlong::both, inputs.read);
    quantise(q, t, role, inputs.read, stream);
    return q;
  };
  Reading read = inputs.read;
  detail::Quantised input, gradient;
  if (inputs.kept) {
    input = in_fp8(x, Role::activations);
    read.kept_input = input.columns;
  }
  if (inputs.gradient_from_swiglu) gradient = in_fp8(out, Role::gradients);
  const std::string shape = formatted("{} {} x {} x {}", name, N, O, I);
  timer.measure(shape, calls, [&] {
    if (inputs.from_swiglu) linear_forward(out, input.rows, weight, bias, stream, read);
    else linear_forward(out, x, weight, bias, stream, read);
  });
  const Tensor dx = timer.tensor(dtype, x.shape);
  timer.measure(shape, calls, [&] {
    if (inputs.gradient_from_swiglu) linear_backward(dx, dweight, gradient, x, weight, Accumulate::no, stream, read);
    else linear_backward(dx, dweight, dbias, out, x, weight, Accumulate::no, stream, read);
  });
}

void measure_embedding(OpTimer& timer, const ModelConfig& c, const BatchShape& s, Tensor tokens, Tensor positions) {
  const auto scope = timer.scope();
  Stream& stream = timer.stream();
  const int64_t N = s.rows(), C = c.n_embd;
  const bool learned = c.family.positions == Positions::learned;
  const Tensor x = timer.normal({N, C}), wte = timer.normal({c.vocab_size, C});
  const Tensor dwte = timer.filled(0, wte.shape);
  Tensor wpe, dwpe;
  if (learned) wpe = timer.normal({c.n_positions, C}), dwpe = timer.filled(0, wpe.shape);
  const std::string shape = formatted("{} x {}", N, C);
  timer.measure(shape, 1, [&] { embedding_forward(x, tokens, positions, wte, wpe, stream); });
  timer.measure(shape, 1, [&] { embedding_backward(dwte, dwpe, x, tokens, positions, stream); });
}

void measure_norm(OpTimer& timer, const ModelConfig& c, int64_t N) {
  const auto scope = timer.scope();
  Stream& stream = timer.stream();
  const int64_t C = c.n_embd;
  const double L = static_cast<double>(c.n_layer), calls = 2 * L + 1;
  const Tensor x = timer.normal({N, C}), dout = timer.normal({N, C}), out = timer.tensor(dtype, {N, C}),
               sum = timer.tensor(dtype, {N, C}), mean = timer.tensor(DType::fp32, {N}),
               rstd = timer.tensor(DType::fp32, {N});
  const Tensor weight = timer.normal({C}), bias = timer.normal({C}), dx = timer.normal({N, C}),
               dweight = timer.filled(0, {C}), dbias = timer.filled(0, {C});
  const std::string shape = formatted("{} x {}", N, C);
  if (c.family.norm == Norm::rmsnorm) {
    timer.measure(shape, L + 1, [&] { rmsnorm_forward(out, rstd, x, weight, c.norm_eps, stream); });
    timer.measure(shape, L, [&] { residual_rmsnorm_forward(out, rstd, sum, x, dout, weight, c.norm_eps, stream); });
    timer.measure(shape, calls, [&] { rmsnorm_backward(dx, dweight, dout, x, weight, rstd, Accumulate::yes, stream); });
  } else {
    timer.measure(shape, L + 1, [&] { layernorm_forward(out, mean, rstd, x, weight, bias, c.norm_eps, stream); });
    timer.measure(shape, L,
                  [&] { residual_layernorm_forward(out, mean, rstd, sum, x, dout, weight, bias, c.norm_eps, stream); });
    timer.measure(shape, calls, [&] {
      layernorm_backward(dx, dweight, dbias, dout, x, weight, mean, rstd, Accumulate::yes, stream);
    });
  }
}

// The ops that prepare queries and keys for attention.
void measure_heads(OpTimer& timer, const ModelConfig& c, const AttentionShape& s, Tensor positions) {
  const auto scope = timer.scope();
  Stream& stream = timer.stream();
  const int64_t N = s.B * s.T;
  const double L = static_cast<double>(c.n_layer);
  const Tensor qkv = timer.normal({N, c.qkv_size()});
  const std::string shape = formatted("{} x {}", N, c.qkv_size());
  std::optional<RotaryPositions> rotary;
  if (c.family.positions == Positions::rotary) {
    rotary = {timer.tensor(DType::fp32, {s.T, s.D}), positions};
    rotary_table(rotary->table, c.rotary, stream);
  }
  if (c.family.qk_norm != QkNorm::by_head) {
    if (rotary) timer.measure(shape, 2 * L, [&] { rotary_embedding(qkv, *rotary, s, Turn::forward, stream); });
    return;
  }
  const Tensor out = timer.tensor(dtype, qkv.shape), rstd = timer.tensor(DType::fp32, {N, s.Hq + s.Hkv}),
               weight = timer.normal({s.D}), dweight = timer.filled(0, {s.D}), dqkv = timer.normal(qkv.shape);
  timer.measure(shape, L, [&] { qk_norm_forward(out, rstd, qkv, weight, weight, rotary, c.norm_eps, s, stream); });
  timer.measure(shape, L,
                [&] { qk_norm_backward(dqkv, dweight, dweight, qkv, weight, weight, rstd, rotary, s, stream); });
}

// F: the width; rows: the number of rows, on the device, or an empty tensor; down: of the layer that reads it
void measure_activation(OpTimer& timer, const ModelConfig& c, int64_t N, int64_t F, double calls, Tensor rows = {},
                        const LinearInputs& down = {}) {
  const auto scope = timer.scope();
  Stream& stream = timer.stream();
  const Tensor out = timer.normal({N, F}), up = timer.normal({N, c.family.mlp == Mlp::swiglu ? 2 * F : F}),
               dup = timer.tensor(dtype, up.shape);
  const std::string shape = formatted("{} x {}", N, F);
  if (c.family.mlp == Mlp::swiglu && swiglu_writes_fp8(down.read, F, stream.device())) {
    const Operands read = down.read;
    const detail::Operand columns =
        timer.room_in_fp8(out, detail::Role::activations, detail::SumAlong::columns, read).columns;
    const auto in_scratch = [&](const std::function<void()>& op) {
      timer.measure(shape, calls, [&] {
        const auto of_op = stream.scratch().scope();
        op();
      });
    };
    in_scratch([&] { swiglu_backward_in_fp8(out, up, read, stream); });
    if (down.from_swiglu) in_scratch([&] { swiglu_forward_in_fp8(columns, up, read, stream); });
    else timer.measure(shape, calls, [&] { swiglu_forward(out, up, stream, rows); });
  } else if (c.family.mlp == Mlp::swiglu) {
    timer.measure(shape, calls, [&] { swiglu_backward(dup, out, up, stream, rows); });
    timer.measure(shape, calls, [&] { swiglu_forward(out, up, stream, rows); });
  } else {
    const Tensor dbias = timer.filled(0, {F});
    timer.measure(shape, calls, [&] {
      if (c.family.biases == Biases::all) gelu_backward_with_bias(dup, dbias, out, up, stream);
      else gelu_backward(dup, out, up, stream);
    });
    timer.measure(shape, calls, [&] { gelu_forward(out, up, stream); });
  }
}

// One weight matrix of all experts of a layer: grouped products of R rows.   weight (E, O, I)
void measure_grouped(OpTimer& timer, const char* name, int64_t R, const Shape& weights, Tensor offsets, double calls) {
  const auto scope = timer.scope();
  Stream& stream = timer.stream();
  const int64_t E = weights[0], O = weights[1], I = weights[2];
  const Tensor x = timer.normal({R, I}), out = timer.normal({R, O}), weight = timer.normal(weights, 0.02f),
               dweight = timer.filled(0, weights);
  const std::string shape = formatted("{} {} x {} x {}, {} experts", name, R, O, I, E);
  timer.measure(shape, calls, [&] { grouped_linear_forward(out, x, weight, offsets, stream); });
  timer.measure(shape, calls, [&] { grouped_linear_backward_input(x, out, weight, offsets, stream); });
  timer.measure(shape, calls,
                [&] { grouped_linear_backward_weight(dweight, out, x, offsets, Accumulate::no, stream); });
}

// The feed-forward of layers with experts, all on this GPU. The router's weights are random, so the experts get about
// equally many rows.
void measure_experts(OpTimer& timer, const ModelConfig& c, const BatchShape& s, double calls) {
  const auto scope = timer.scope();
  Stream& stream = timer.stream();
  const Router router = c.router();
  const Segments segments = {s.T};
  const int64_t N = s.rows(), C = c.n_embd, E = router.E, k = router.k, R = N * k, F = c.experts.width;
  auto fp32 = [&](const Shape& shape) { return timer.tensor(DType::fp32, shape); };
  auto int32 = [&](const Shape& shape) { return timer.tensor(DType::int32, shape); };
  const Tensor places = int32({N, k}), offsets = int32({E + 1}), weights = fp32({N, k}), dweights = fp32({N, k});
  const Tensor x = timer.normal({N, C}), weight = timer.normal({E, C}, 0.02f), logits = fp32({N, E}),
               choices = int32({N, k}), counts = int32({s.B, E}), probabilities = fp32({s.B, E}), sums = fp32({s.B, 2}),
               totals = timer.tensor(DType::fp64, {4}), chosen = timer.tensor(DType::fp64, {E});
  zero(totals, stream), zero(chosen, stream);
  const std::string routes = formatted("{} x {} of {} experts, C {}", N, k, E, C);
  auto measure = [&](const std::function<void()>& op) { timer.measure(routes, calls, op); };
  measure([&] { router_logits(logits, x, weight, stream); });
  measure([&] { router_forward(choices, weights, logits, {}, router, stream); });
  measure([&] { router_statistics(counts, probabilities, sums, logits, choices, router, segments, stream); });
  measure([&] { add_expert_counts(chosen, counts, stream); });
  measure([&] { router_losses(totals.slice(0, {3}), counts, probabilities, sums, router, s.T, stream); });
  measure([&] { dispatch_plan(places, offsets, choices, {}, {}, segments, {R}, stream); });
  measure([&] { count_dropped(totals.slice(3, {1}), R, offsets, stream); });
  {
    const auto scope_of_rows = timer.scope();
    const Tensor rows = timer.normal({R, C}), out = timer.normal({N, C});
    measure([&] { dispatch_rows(rows, x, places, stream); });
    measure([&] { combine_rows(out, rows, weights, places, Accumulate::no, stream); });
    measure([&] { combine_backward(rows, dweights, out, rows, weights, places, stream); });
    timer.measure(routes + ", backward", calls, [&] { combine_rows(out, rows, {}, places, Accumulate::no, stream); });
  }
  {
    const auto scope_of_gradients = timer.scope();
    const Tensor dlogits = fp32({N, E}), dx = timer.normal({N, C}), dweight = timer.filled(0, {E, C});
    measure([&] { router_backward(dlogits, dweights, logits, choices, {}, router, {}, segments, stream); });
    measure([&] { router_backward_input(dx, dlogits, weight, Accumulate::yes, stream); });
    measure([&] { router_backward_weight(dweight, dlogits, x, Accumulate::no, stream); });
  }
  measure_grouped(timer, "experts, up", R, {E, 2 * F, C}, offsets, calls);
  measure_activation(timer, c, R, F, calls, offsets.slice(E, {1}));
  measure_grouped(timer, "experts, down", R, {E, C, F}, offsets, calls);
  if (const int64_t shared = c.experts.shared; shared > 0) {  // its gate is not worth a row
    measure_linear(timer, "shared expert, up", N, 2 * shared, C, Bias::no, calls);
    measure_activation(timer, c, N, shared, calls);
    measure_linear(timer, "shared expert, down", N, C, shared, Bias::no, calls);
  }
}

void measure_residual(OpTimer& timer, const ModelConfig& c, int64_t N) {
  const auto scope = timer.scope();
  const Tensor out = timer.tensor(dtype, {N, c.n_embd}), a = timer.normal(out.shape), b = timer.normal(out.shape);
  timer.measure(formatted("{} x {}", N, c.n_embd), static_cast<double>(c.n_layer),
                [&] { residual_forward(out, a, b, timer.stream()); });
}

void measure_loss(OpTimer& timer, const ModelConfig& c, int64_t N, Tensor targets) {
  const auto scope = timer.scope();
  const Tensor logits = timer.normal({N, c.padded_vocab()}), losses = timer.tensor(DType::fp32, {N});
  timer.measure(formatted("{} x {}", N, c.padded_vocab()), 1, [&] {
    cross_entropy(losses, logits, targets, c.vocab_size, 1 / static_cast<double>(N), Gradient::yes, timer.stream());
  });
}

// The end of a step, for as many weights as the embedding has.
void measure_update(OpTimer& timer, const ModelConfig& c) {
  const auto scope = timer.scope();
  Stream& stream = timer.stream();
  const int64_t n = c.padded_vocab() * c.n_embd;
  const double calls = static_cast<double>(count_parameters(parameter_table(c))) / static_cast<double>(n);
  const Tensor weight = timer.normal({n}, 0.02f), master = timer.tensor(DType::fp32, {n}),
               gradient = timer.tensor(DType::fp32, {n}), moment1 = timer.filled(0, {n}),
               moment2 = timer.filled(0, {n}), sum = timer.tensor(DType::fp64, {1}),
               control = timer.tensor(DType::fp64, {4});
  convert(master, weight, stream);
  convert(gradient, weight, stream);
  upload(control, std::vector<double>{1, 1, 1, 0}, stream);  // norm 1, scale 1, update allowed
  const OptimizerOptions options{
      .lr = 1e-4f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .step = 1};
  const std::string shape = formatted("{}", n);
  timer.measure(shape, calls, [&] { square_sum(sum, gradient, stream); });
  timer.measure(shape, calls, [&] {
    update_weights(Optimizer::adamw, weight, master, {moment1, moment2}, gradient, control, options, stream);
  });
  timer.measure(shape, calls, [&] { zero(gradient, stream); });
}

void measure_model(OpTimer& timer, const ModelConfig& c, const BatchShape& s, Operands read) {
  const int64_t N = s.rows(), C = c.n_embd;
  const double L = static_cast<double>(c.n_layer);
  const AttentionShape heads = attention_shape(c, s);
  // As of a layer of a dense model, none of whose activations are recomputed.
  const bool fp8 = detail::multiplies_fp8(read, timer.stream().device()), kept = fp8 && c.experts.count == 0,
             swiglu = c.family.mlp == Mlp::swiglu && swiglu_writes_fp8(read, c.n_ffn, timer.stream().device());
  const LinearInputs down{read, kept, kept && swiglu};
  const Bias all = c.family.biases == Biases::all ? Bias::yes : Bias::no,
             qkv = c.family.biases == Biases::none ? Bias::no : Bias::yes;
  std::vector<int32_t> places(static_cast<size_t>(N));
  for (int64_t n = 0; n < N; ++n) places[static_cast<size_t>(n)] = static_cast<int32_t>(n % s.T);
  const Tensor tokens = timer.token_ids(N, c.vocab_size), positions = timer.integers(std::move(places));
  measure_embedding(timer, c, s, tokens, positions);
  measure_norm(timer, c, N);
  measure_linear(timer, "qkv", N, c.qkv_size(), C, qkv, L, Bias::yes, {read, kept});
  measure_heads(timer, c, heads, positions);
  measure_attention(timer, heads, L);
  measure_linear(timer, "proj", N, C, c.q_size(), all, L, Bias::yes, {read});
  measure_residual(timer, c, N);
  const double sparse = static_cast<double>(c.sparse_layers()), dense = L - sparse;
  if (dense > 0) {
    measure_linear(timer, "up", N, c.mlp_in_size(), C, all, dense, c.family.mlp == Mlp::gelu ? Bias::no : Bias::yes,
                   {read, kept, false, swiglu});
    measure_activation(timer, c, N, c.n_ffn, dense, {}, down);
    measure_linear(timer, "down", N, C, c.n_ffn, all, dense, Bias::yes, down);
  }
  if (sparse > 0) measure_experts(timer, c, s, sparse);
  measure_linear(timer, "head", N, c.padded_vocab(), C, Bias::no, 1);
  measure_loss(timer, c, N, tokens);
  measure_update(timer, c);
}

// ---- Output ---------------------------------------------------------------------------------------------------------

void print_table(const std::string& title, const std::vector<OpTime>& times, const Roofs& roofs, std::ofstream& json) {
  std::printf(
      "\n### %s\n\n| op | shape | us | GFLOP | MB | TFLOP/s | GB/s | bound by | of the roofline | calls | ms per step "
      "|\n"
      "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
      title.c_str());
  for (const OpTime& t : times) {
    const bool memory = t.bytes / roofs.bandwidth >= t.flops / roofs.matmul;
    std::printf("| %s | %s | %.1f | %.1f | %.1f | %.1f | %.0f | %s | %.0f%% | %.1f | %.3f |\n", t.op.c_str(),
                t.shape.c_str(), 1e6 * t.seconds, 1e-9 * t.flops, 1e-6 * t.bytes, 1e-12 * t.flops / t.seconds,
                1e-9 * t.bytes / t.seconds, memory ? "memory" : "matmul", 100 * roofs.seconds(t) / t.seconds, t.calls,
                1e3 * t.calls * t.seconds);
    if (json.is_open())
      json << nlohmann::ordered_json{{"model", title},       {"op", t.op},           {"shape", t.shape},
                                     {"calls", t.calls},     {"flops", t.flops},     {"bytes", t.bytes},
                                     {"seconds", t.seconds}, {"fastest", t.fastest}, {"roof", roofs.seconds(t)}}
                  .dump()
           << std::endl;
  }
  std::fflush(stdout);
}

// The total over a step, and how much of the planned step the table covers.
void print_step(const std::vector<OpTime>& times, const Roofs& roofs, const StepConfig& step, const Device& device) {
  double seconds = 0, least = 0, flops = 0, bytes = 0, planned_flops = 0, planned_bytes = 0;
  std::string lacking;
  for (const OpTime& t : times) {
    seconds += t.calls * t.seconds;
    least += t.calls * roofs.seconds(t);
    flops += t.calls * t.flops;
    bytes += t.calls * t.bytes;
  }
  for (const auto& [name, totals] : make_plan(step, device).step_ops) {
    planned_flops += totals.flops;
    planned_bytes += totals.bytes;
    if (std::none_of(times.begin(), times.end(), [&](const OpTime& t) { return t.op == name; })) lacking += " " + name;
  }
  const double tokens = static_cast<double>(step.tokens());
  std::printf(
      "\nA step of these ops: %.2f ms, %.0f tokens/s; at the roofline %.2f ms, %.0f tokens/s. The table has %.1f%% of "
      "the flops and %.1f%% of the bytes of a planned step;%s\n",
      1e3 * seconds, tokens / seconds, 1e3 * least, tokens / least, 100 * flops / planned_flops,
      100 * bytes / planned_bytes, lacking.empty() ? " it has every op." : (" it lacks" + lacking).c_str());
  std::fflush(stdout);
}

void run(const Settings& settings) {
  const Device device{.kind = DeviceKind::cuda};
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, device.gpu));
  const int64_t flush = settings.flush_mib > 0 ? settings.flush_mib << 20 : int64_t{8} * properties.l2CacheSize;
  const OpTimer::Settings timing{settings.repeats, flush};
  std::ofstream json;
  if (!settings.json.empty()) {
    json.open(settings.json);
    CHECK(json.is_open(), "--json {}: cannot be written; name a file in a directory that exists", settings.json);
  }
  const Roofs roofs = measure_roofs(device, timing, settings);
  std::printf(
      "%s, %s. Medians of %lld runs, inputs not in the L2 cache (%.0f MB). Roofline, the fastest of as many: "
      "a copy of %lld MiB, %.0f GB/s read and written; a product of %lld^3 in bf16, %.1f TFLOP/s.\n",
      properties.name, matmul_library(device).c_str(), static_cast<long long>(settings.repeats),
      1e-6 * properties.l2CacheSize, static_cast<long long>(settings.copy_mib), 1e-9 * roofs.bandwidth,
      static_cast<long long>(settings.peak_size), 1e-12 * roofs.matmul);
  for (const std::string& model : settings.models) {
    StepConfig step{.model = resolve_model(model, {}), .precision = dtype, .batch = settings.batch, .generates = false};
    step.precision.linear = settings.products;
    const std::vector<OpTime> times = OpTimer::run(
        device, timing, [&](OpTimer& timer) { measure_model(timer, step.model, step.batch, settings.products); });
    print_table(formatted("{}, B {} T {}", model, step.batch.B, step.batch.T), times, roofs, json);
    print_step(times, roofs, step, device);
  }
  if (settings.long_sequence == 0) return;
  const int64_t T = settings.long_sequence;
  const std::vector<OpTime> times = OpTimer::run(device, timing, [&](OpTimer& timer) {
    for (const AttentionShape& s : {AttentionShape{4, T, 12, 12, 64}, {4, T, 16, 16, 128}, {4, T, 32, 8, 128}})
      measure_attention(timer, s, 0);
  });
  print_table("attention of long sequences", times, roofs, json);
}

}  // namespace
}  // namespace llmc

int main(int argc, char** argv) {
  llmc::Settings settings;
  CLI::App app("Times each op of a bf16 training step on this GPU.");
  app.add_option("--models", settings.models, "presets, or directories with a config.json");
  app.add_option("-b,--batch-size", settings.batch.B, "sequences per batch")->check(CLI::PositiveNumber);
  app.add_option("-t,--seq-len", settings.batch.T, "tokens per sequence")->check(CLI::PositiveNumber);
  app.add_flag_callback(
      "--fp8", [&] { settings.products = llmc::Operands::fp8_block; },
      "the trainer's --products fp8-block; the roofline stays that of bf16");
  app.add_option("--repeats", settings.repeats, "timed runs of each op")->check(CLI::PositiveNumber);
  app.add_option("--long-sequence", settings.long_sequence, "also time attention at this length; 0: skip");
  app.add_option("--copy-mib", settings.copy_mib, "size of the copy that measures the bandwidth, read and written")
      ->check(CLI::PositiveNumber);
  app.add_option("--peak-size", settings.peak_size, "size of the square matmul that measures the peak")
      ->check(CLI::PositiveNumber);
  app.add_option("--flush-mib", settings.flush_mib,
                 "memory read before each run to evict inputs; 0: eight times the L2 cache");
  app.add_option("--json", settings.json, "also write the rows to this file, one object per line");
  CLI11_PARSE(app, argc, argv);
  try {
    llmc::run(settings);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "op_table: %s\n", error.what());
    return 1;
  }
}
