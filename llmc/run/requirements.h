// requirements.h: options that need a GPU, or a step that a library or kernel can compute: refused before a run starts.
#pragma once
#include "run/setup.h"
#include "schedule/token_slices.h"

namespace llmc {

inline void require_gpu_for(const char* option, bool asked, const Device& device, const Options& o) {
  CHECK(!asked || device.kind == DeviceKind::cuda, "{} needs a GPU, and this run does not use one{}", option,
        o.device == DeviceChoice::cpu ? " (--device cpu)" : ": " + visible_gpus().why_none);
}

namespace detail {

// option: as the user would write it
inline void require_whole_products(const std::string& option, const StepConfig& step, const Device& device,
                                   const Options& o) {
  require_gpu_for((option + " cublaslt").c_str(), true, device, o);
  CHECK(step.layout.tensor.ranks == 1,
        "{} cublaslt: --tp {} computes products in parts of their rows: use --tp 1 or {} own", option,
        step.layout.tensor.ranks, option);
}

}  // namespace detail

// Rejects --residual cublaslt if the products of the step cannot add to the residual stream.
inline void require_residual_can(const StepConfig& step, const Device& device, const Options& o) {
  if (!device.residual_in_products) return;
  detail::require_whole_products("--residual", step, device, o);
  CHECK(
      step.precision.linear == Operands::as_stored,
      "--residual cublaslt is not for products in fp8, and this is --products {}: use --products {} or --residual own",
      step.precision.linear, Operands::as_stored);
}

// Rejects --gelu cublaslt if its products do not compute GELU as the step needs it.
inline void require_gelu_can(const StepConfig& step, const Device& device, const Options& o) {
  if (!device.gelu_in_products) return;
  detail::require_whole_products("--gelu", step, device, o);
  CHECK(step.model.family.mlp == Mlp::gelu, "--gelu cublaslt: models of type {} have SwiGLU: use --gelu own",
        step.model.family.model_type);
  CHECK(step.precision.products == DType::bf16 && step.precision.linear == Operands::as_stored,
        "--gelu cublaslt needs products in bf16, and this is --dtype {} --products {}: use --dtype bf16 --products {}, "
        "or --gelu own",
        o.dtype, step.precision.linear, Operands::as_stored);
  CHECK(step.model.n_ffn % 8 == 0,
        "--gelu cublaslt: --n-ffn is {}, and cuBLASLt's GELU needs a multiple of 8: use --n-ffn {}, or --gelu own",
        step.model.n_ffn, multiples_beside(step.model.n_ffn, 8));
  CHECK(!repeats_activation_alone(step.recompute),
        "--gelu cublaslt with --recompute {}: an own kernel would compute GELU again, with other roundings: use --gelu "
        "own, or --recompute none or block",
        o.recompute);
}

// Rejects --attention cudnn if cuDNN does not compute what the step needs.
inline void require_cudnn_can(const StepConfig& step, const Device& device, const Options& o) {
  require_gpu_for("--attention cudnn", device.cudnn, device, o);
  CHECK(!device.cudnn || (step.precision.products == DType::bf16 && !o.mask_documents),
        "--attention cudnn needs --dtype bf16 and cannot mask documents: leave out --mask-documents, use --dtype bf16, "
        "or use --attention own");
  CHECK(!device.cudnn || !step.qk_clip,
        "--attention cudnn returns no logits for --qk-clip {}: use --attention own, or leave out --qk-clip",
        step.qk_clip.value_or(0));
  CHECK(!device.cudnn || step.layout.context.ranks == 1,
        "--attention cudnn computes whole sequences on one rank, and --cp {} divides them: use --attention own",
        step.layout.context.ranks);
  CHECK(!device.cudnn || step.layout.pipeline.slices.empty(),
        "--attention cudnn computes whole sequences, and --token-slices {} cuts them: use --attention own",
        o.token_slices);
}

// Rejects models whose channels the GPU's norms have no room for.
inline void require_norms_can(const StepConfig& step, const Device& device) {
  if (device.kind == DeviceKind::cuda && !is_gpu_elsewhere(device))
    check_norm_fits(device, step.precision.activations,
                    step.model.family.norm == Norm::layernorm ? Centred::yes : Centred::no, step.model.n_embd);
}

// Rejects --products in fp8 on GPUs whose tensor cores do not multiply such numbers. asked: the option
inline void require_gpu_for_fp8(Operands read, const std::string& asked, const Device& device) {
  CHECK(
      read != Operands::fp8_block || !device.machine || device.machine->cores > 0 ||
          device.machine->fp8_flops_per_s > 0,
      "{}: its products are for Hopper, and --machine {} has no tflops in fp8: use h100x8 or h200x8, or --products {}",
      asked, device.machine->name, Operands::as_stored);
  if (device.kind != DeviceKind::cuda || is_gpu_elsewhere(device)) return;
  const GpuInfo gpu = gpu_info(device.gpu);
  const int capability = 10 * gpu.major + gpu.minor, least = read == Operands::mxfp8 ? 100 : 89;
  CHECK(read == Operands::fp8_block ? capability == 90 : capability >= least,
        "{}: its numbers are those of {}, and GPU {} is {} (sm_{}{}): use --products {}", asked,
        read == Operands::fp8_block ? "Hopper (sm_90)"
        : read == Operands::mxfp8   ? "Blackwell (from sm_100 on)"
                                    : "Ada, Hopper and later (from sm_89 on)",
        device.gpu, gpu.name, gpu.major, gpu.minor, Operands::as_stored);
}
// Rejects --products in fp8 where blocks of a product would depend on how the work is divided, and what
// require_gpu_for_fp8() rejects.
inline void require_fp8_can(const StepConfig& step, const Device& device) {
  const Operands read = step.precision.linear;
  if (read == Operands::as_stored) return;
  const ModelConfig& m = step.model;
  const Layout& l = step.layout;
  const std::string asked = formatted("--products {}", read);
  const int64_t block = detail::recipe_of(read).block;
  if (block == ScaleBlock::all) {
    const std::string why = "one scale is for all that the ranks of a product share", use = "fp8 or fp8-block";
    CHECK(l.tensor.ranks == 1, "{} with --tp {}: {}: use --tp 1, or --products {}", asked, l.tensor.ranks, why, use);
    CHECK(l.context.ranks == 1, "{} with --cp {}: {}: use --cp 1, or --products {}", asked, l.context.ranks, why, use);
    CHECK(l.expert.ranks == 1, "{} with --ep {}: {}: use --ep 1, or --products {}", asked, l.expert.ranks, why, use);
    CHECK(l.pipeline.slices.empty(),
          "{} with --token-slices {}: {}, and for all of a sequence: leave out --token-slices, or use --products {}",
          asked, l.pipeline.slices.size(), why, use);
    return require_gpu_for_fp8(read, asked, device);
  }
  std::vector<int64_t> runs = l.pipeline.slices;  // tokens of a sequence that a rank multiplies one after another
  if (runs.empty()) runs = {l.context.ranks > 1 ? l.context.share(step.batch.T) / 2 : step.batch.T};
  const auto whole_blocks = [&](int64_t run) { return run % block == 0; };
  std::string use = formatted("a --seq-len that is a multiple of {}",
                              block * (l.context.ranks > 1 ? 2 * l.context.ranks : std::ssize(runs)));
  for (int64_t slices = std::ssize(runs) - 1; slices > 0 && whole_blocks(step.batch.T); --slices)
    if (std::ranges::all_of(even_token_slices(step.batch.T, slices), whole_blocks)) {
      use = formatted("--token-slices {}", slices);
      break;
    }
  for (const int64_t run : runs)
    CHECK(whole_blocks(run),
          "{}: a rank multiplies {} tokens of a sequence at a time, and blocks have {}: use {}, or --products {}",
          asked, run, block, use, Operands::as_stored);
  for (const int64_t run : runs) {  // on GPUs products in fp8 have multiples of 16 rows
    const int64_t rows = step.batch.B * run * (l.context.ranks > 1 ? 2 : 1);
    CHECK(
        !l.tensor.overlap || device.kind != DeviceKind::cuda || rows % (16 * l.tensor.ranks) == 0,
        "{} with --tp-overlap: a rank's part of {} tokens is a product of its own, and with --tp {} no multiple of 16: "
        "leave out --tp-overlap, or use another --tp",
        asked, rows, l.tensor.ranks);
  }
  const ModelConfig part = model_of_rank(m, l.tensor);
  const bool divided = l.tensor.ranks > 1;
  const int64_t whole = divided ? block : 16;  // the part of a rank has whole blocks
  CHECK(m.n_embd % 16 == 0,
        "{}: the {} channels of the model are no multiple of 16: use another --n-embd or --model, or --products {}",
        asked, m.n_embd, Operands::as_stored);
  struct Width {
    const char* what;
    int64_t size;
  };
  for (const Width& w : {Width{"queries", part.q_size()}, Width{"keys", part.kv_size()},
                         Width{"feed-forward", m.sparse_layers() < m.n_layer ? part.n_ffn : whole},
                         Width{"shared expert", part.experts.shared}})
    CHECK(w.size % whole == 0,
          "{}: the {} channels of the {} {} are no multiple of {}: use another {}, or --products {}", asked, w.size,
          w.what, divided ? "of a rank" : "of the model", whole, divided ? "--tp" : "--model", Operands::as_stored);
  require_gpu_for_fp8(read, asked, device);
}

// Does require_fp8_can() accept the step?
inline bool fp8_can(const StepConfig& step, const Device& device) try {
  require_fp8_can(step, device);
  return true;
} catch (const Error&) {
  return false;
}

}  // namespace llmc
