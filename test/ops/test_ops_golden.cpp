// Every op against PyTorch, golden/ops.safetensors, in fp32 and bf16.
#include "catch2.h"
#include "ops/op_bench.h"

using namespace llmc;

TEST_CASE("every op agrees with PyTorch in fp32 and bf16", "[ops][pytorch]") {
  for (const DType d : {DType::fp32, DType::bf16}) {
    Bench b;
    const Golden golden(d);
    auto in = [&](const std::string& name, const Shape& shape) { return golden.load(b, name, d, shape); };
    {
      const Tensor tokens = golden.integers(b, "embedding.tokens"),
                   positions = golden.integers(b, "embedding.positions");
      const Tensor out = b.poisoned(d, {7, 36}), dwte = b.zeros(DType::fp32, {11, 36}),
                   dwpe = b.zeros(DType::fp32, {5, 36});
      embedding_forward(out, tokens, positions, in("embedding.wte", {11, 36}), in("embedding.wpe", {5, 36}), b.stream);
      embedding_backward(dwte, dwpe, in("embedding.dout", {7, 36}), tokens, positions, b.stream);
      golden.require(b, out, "embedding.out");
      golden.require(b, dwte, "embedding.dwte");
      golden.require(b, dwpe, "embedding.dwpe");
    }
    {
      const Tensor x = in("layernorm.x", {7, 36}), w = in("layernorm.weight", {36}),
                   dout = in("layernorm.dout", {7, 36});
      const Tensor out = b.poisoned(d, {7, 36}), dx = b.poisoned(d, {7, 36}), mean = b.poisoned(DType::fp32, {7}),
                   rstd = b.poisoned(DType::fp32, {7});
      const Tensor dw = b.zeros(DType::fp32, {36}), db = b.zeros(DType::fp32, {36});
      layernorm_forward(out, mean, rstd, x, w, in("layernorm.bias", {36}), 1e-5f, b.stream);
      layernorm_backward(dx, dw, db, dout, x, w, mean, rstd, Accumulate::no, b.stream);
      golden.require(b, out, "layernorm.out");
      golden.require(b, dx, "layernorm.dx");
      golden.require(b, dw, "layernorm.dweight");
      golden.require(b, db, "layernorm.dbias");
    }
    {  // the gradient of a residual stream: added to in bf16, rounded once
      const std::string op = "residual_layernorm.";
      const Tensor x = in(op + "x", {7, 36}), w = in(op + "weight", {36}), dout = in(op + "dout", {7, 36});
      const Tensor branch = b.poisoned(d, {7, 36}), mean = b.poisoned(DType::fp32, {7}),
                   rstd = b.poisoned(DType::fp32, {7});
      const Tensor dx = in(op + "dout", {7, 36}), dw = b.zeros(DType::fp32, {36}), db = b.zeros(DType::fp32, {36});
      layernorm_forward(branch, mean, rstd, x, w, in(op + "bias", {36}), 1e-5f, b.stream);
      layernorm_backward(dx, dw, db, dout, x, w, mean, rstd, Accumulate::yes, b.stream);
      golden.require(b, dx, op + "dx");
      golden.require(b, dw, op + "dweight");
      golden.require(b, db, op + "dbias");
      residual_forward(branch, x, branch, b.stream);
      golden.require(b, branch, op + "out", Rounding::inside_too);  // the branch was rounded
    }
    {
      const Tensor x = in("linear.x", {7, 36}), w = in("linear.weight", {50, 36}), dout = in("linear.dout", {7, 50});
      const Tensor out = b.poisoned(d, {7, 50}), dx = b.poisoned(d, {7, 36}), dw = b.zeros(DType::fp32, {50, 36}),
                   db = b.zeros(DType::fp32, {50});
      linear_forward(out, x, w, in("linear.bias", {50}), b.stream);
      linear_backward_input(dx, dout, w, b.stream);
      linear_backward_weight(dw, db, dout, x, Accumulate::no, b.stream);
      golden.require(b, out, "linear.out");
      golden.require(b, dx, "linear.dx");
      golden.require(b, dw, "linear.dweight");
      golden.require(b, db, "linear.dbias");
      linear_backward_weight(dw, db, dout, x, Accumulate::yes, b.stream);  // a second micro-batch: the sum is in fp32
      scale(dw, 0.5f, b.stream);
      scale(db, 0.5f, b.stream);
      golden.require(b, dw, "linear.dweight");
      golden.require(b, db, "linear.dbias");
    }
    {
      const Tensor x = in("gelu.x", {7, 36}), out = b.poisoned(d, {7, 36}), dx = b.poisoned(d, {7, 36});
      gelu_forward(out, x, b.stream);
      gelu_backward(dx, in("gelu.dout", {7, 36}), x, b.stream);
      golden.require(b, out, "gelu.out");
      golden.require(b, dx, "gelu.dx");
    }
    for (const auto& [name, s] : {std::pair<std::string, AttentionShape>{"attention", {2, 37, 3, 3, 12}},
                                  {"grouped_attention", {2, 37, 4, 2, 12}}}) {
      const int64_t N = s.B * s.T, width = (s.Hq + 2 * s.Hkv) * s.D;
      const Tensor qkv = in(name + ".qkv", {N, width}), out = b.poisoned(d, {N, s.Hq * s.D}),
                   dqkv = b.poisoned(d, {N, width});
      const Tensor lse = b.poisoned(DType::fp32, {s.B, s.Hq, s.T});
      attention_forward(out, lse, qkv, qkv, {}, whole_sequences(s), b.stream);
      attention_backward(dqkv, dqkv, in(name + ".dout", {N, s.Hq * s.D}), out, qkv, qkv, lse, {}, whole_sequences(s),
                         Accumulate::no, b.stream);
      golden.require(b, out, name + ".out",
                     Rounding::inside_too);  // where bf16 is multiplied, probabilities are rounded
      golden.require(b, dqkv, name + ".dqkv", Rounding::inside_too);
    }
    {
      const Tensor out = b.poisoned(d, {7, 36});
      residual_forward(out, in("residual.a", {7, 36}), in("residual.b", {7, 36}), b.stream);
      golden.require(b, out, "residual.out");
    }
    {
      const Tensor logits = in("cross_entropy.logits", {7, 31}), losses = b.poisoned(DType::fp32, {7});
      cross_entropy(losses, logits, golden.integers(b, "cross_entropy.targets"), 31, 1.0 / 7, Gradient::yes, b.stream);
      golden.require(b, losses, "cross_entropy.losses");
      golden.require(b, logits, "cross_entropy.dlogits");
    }
    // bf16 weights are rounded fp32 masters, which match PyTorch as closely as fp32 weights do.
    for (const auto& [op, max_norm] : {std::pair<std::string, double>{"adamw", 0}, {"clipped_adamw", 1}}) {
      const bool rounded = d == DType::bf16;
      const Tensor master = golden.load(b, op + ".before", DType::fp32, {133}),
                   weight = rounded ? b.as(d, master) : master;
      const Tensor m = b.zeros(DType::fp32, {133}), v = b.zeros(DType::fp32, {133}),
                   sums = b.poisoned(DType::fp64, {2}), loss = b.zeros(DType::fp64, {1}),
                   control = b.zeros(DType::fp64, {4});
      for (int step = 1; step <= 3; ++step) {
        const Tensor g = golden.load(b, formatted("{}.gradient{}", op, step), DType::fp32, {133});
        square_sum(sums.slice(0, {1}), g.slice(0, {100}), b.stream);
        square_sum(sums.slice(1, {1}), g.slice(100, {33}), b.stream);
        clip_control(control, sums, loss, {.max_norm = max_norm}, b.stream);
        update_weights(Optimizer::adamw, weight, rounded ? master : Tensor{}, {m, v}, g, control,
                       {.lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .step = step},
                       b.stream);
        golden.require(b, control.slice(0, {1}), formatted("{}.norm{}", op, step));
        golden.require(b, master, formatted("{}.after{}", op, step));
        golden.require(b, weight, formatted("{}.after{}", op, step));
        REQUIRE(std::memcmp(weight.bytes, b.as(d, master).bytes, static_cast<size_t>(weight.size_bytes())) == 0);
        REQUIRE((control.data<double>()[1] < 1) == (max_norm > 0 && step > 1));
      }
    }
    if (d == DType::bf16) {  // of a bf16 gradient: the sum is still in double
      const Tensor norm = b.poisoned(DType::fp64, {1});
      square_sum(norm, in("gradient_norm.gradient", {133}), b.stream);
      b.stream.synchronize();
      *norm.data<double>() = std::sqrt(*norm.data<double>());
      golden.require(b, norm, "gradient_norm.norm");
    }
  }
}
