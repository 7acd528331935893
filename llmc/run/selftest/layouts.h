// layouts.h: the models and layouts that --selftest compares: tiny models with awkward sizes, and the layouts
// of a number of ranks. A new axis of parallelism is a few more lines of layouts().
#pragma once
#include <compare>

#include "core/rng.h"
#include "model/layout_faults.h"
#include "train/step_config.h"

namespace llmc::selftest {

inline constexpr int64_t sequences = 24, seq_len = 19;  // per step; numbers of ranks that do not divide it are left out
inline constexpr int64_t few_layers = 3;
inline constexpr int steps = 2;

// A tiny model with odd sizes: uneven layers, grouped heads, a vocabulary that is a multiple of nothing.
inline ModelConfig awkward_model(const char* family = "gpt2", bool tied = true) {
  ModelConfig m;
  m.family = *find_family(family);
  m.n_layer = few_layers;
  const bool grouped = m.family.norm == Norm::rmsnorm;
  m.n_head = grouped ? 6 : 3;
  m.n_kv_head = grouped ? 2 : 3;
  m.head_size = grouped ? 6 : 7;
  m.n_embd = m.family.own_head_size ? 22 : m.q_size();
  m.n_ffn = 50;
  if (m.family.experts != ExpertFields::none) {
    const std::string_view type = m.family.model_type;
    const bool one_width = m.family.experts == ExpertFields::one_width, shared = type == "qwen2_moe";
    m.experts = {.count = 5, .per_token = 2, .width = one_width ? m.n_ffn : 13};
    if (shared) m.experts.shared = 24, m.experts.shared_gate = true;
    m.experts.normalised = type == "mixtral" || type == "qwen3_moe";
    if (!one_width) m.experts.dense_layers = {1};
  }
  m.vocab_size = 131;
  m.n_positions = seq_len;
  m.tied = tied;
  m.rotary.scaled = m.family.model_type == std::string_view("llama");
  m.rotary.scaling.original_positions = 8;  // so that a short sequence sees the scaling
  return m;
}

// The models that are compared: every family in every dtype, GPT-2 with tied and untied embeddings. Models with given
// head counts are for tensor parallelism, which must be able to divide the heads; those with a length, for context
// parallelism, which must be able to cut it; those with more layers, for pipeline stages.
struct Model {
  const char* family;
  bool tied;
  DType dtype;
  int64_t heads = 0, kv_heads = 0, length = seq_len, layers = few_layers;

  ModelConfig config() const {
    ModelConfig m = awkward_model(family, tied);
    if (heads == 0) return m;
    m.n_head = heads;
    m.n_kv_head = kv_heads;
    m.head_size = 4;
    m.n_embd = m.family.own_head_size ? 22 : m.q_size();
    m.n_ffn = 7 * heads;
    if (m.family.experts == ExpertFields::one_width) m.experts.width = m.n_ffn;
    if (m.experts.count > 0) m.experts.count = 8;
    m.vocab_size = 97;
    m.n_positions = length;
    m.n_layer = layers;
    return m;
  }
};
inline std::vector<Model> all_models() {
  std::vector<Model> all;
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    bool tied = true;  // the families take turns
    all.push_back({"gpt2", false, dtype});
    for (const Family& f : families)
      if (f.experts == ExpertFields::none) all.push_back({f.model_type, std::exchange(tied, !tied), dtype});
    all.push_back({"gpt2", true, dtype, 8, 8});
    all.push_back({"llama", false, dtype, 6, 3});
    all.push_back({"qwen2", true, dtype, 8, 2});
    all.push_back({"qwen3", false, dtype, 8, 4});
    all.push_back({"qwen3", true, dtype, 8, 1});
    all.push_back({"gpt2", false, dtype, 8, 8, 48});
    all.push_back({"qwen3", true, dtype, 8, 2, 48});
    all.push_back({"llama", false, dtype, 8, 4, seq_len, 9});
    all.push_back({"gpt2", true, dtype, 8, 8, seq_len, 8});
  }
  // With these sizes no token has scores of two experts closer than fp32's rounding; for bf16: init_routes_by_token().
  all.push_back({"qwen2_moe", false, DType::fp32, 8, 2, 20});
  all.push_back({"qwen2_moe", false, DType::bf16, 8, 2, 20});
  return all;
}

// Is it the first of the layouts that agree bit for bit?
inline bool begins(const Layout& l) {
  if (l.pipeline.stages > 1) return l.zero.stage == 0 && l.pipeline.schedule == Schedule::gpipe;
  return l.zero.stage == 0 && l.zero.sync <= DpSync::parameter_server && !l.tensor.overlap;
}

inline std::string to_string(const Layout& layout) {
  const auto& [zero, tensor, context, expert, pipeline] = layout;
  std::string text = formatted("dp {} = {} x {}, {}, stage {}, reduce {}", layout.readers(), zero.replicas,
                               layout.readers() / zero.replicas, zero.sync, zero.stage, zero.grad_reduce);
  if (pipeline.stages > 1) text += formatted(", pp {} {}", pipeline.stages, pipeline.schedule);
  if (pipeline.chunks_per_stage > 1) text += formatted(" in {} chunks", pipeline.chunks_per_stage);
  if (expert.ranks > 1) text += formatted(", ep {}", expert.ranks);
  if (context.ranks > 1) text += formatted(", cp {} {}", context.ranks, context.attention);
  if (tensor.ranks > 1)
    text +=
        formatted(", tp {}{}{}", tensor.ranks, tensor.sequence ? " by rows" : "", tensor.overlap ? " overlapped" : "");
  return text;
}

// The axes that some of these layouts have: "dp, ZeRO, pp".
inline std::string axes_of(const std::vector<Layout>& layouts) {
  const std::pair<const char*, bool (*)(const Layout&)> axes[] = {
      {"dp", [](const Layout& l) { return l.readers() > 1; }},
      {"ZeRO", [](const Layout& l) { return l.zero.stage > 0; }},
      {"parameter servers", [](const Layout& l) { return l.zero.sync != DpSync::all_reduce; }},
      {"tp", [](const Layout& l) { return l.tensor.ranks > 1; }},
      {"cp", [](const Layout& l) { return l.context.ranks > 1; }},
      {"pp", [](const Layout& l) { return l.pipeline.stages > 1; }},
      {"ep", [](const Layout& l) { return l.expert.ranks > 1; }}};
  std::string text;
  for (const auto& [name, has] : axes)
    if (std::ranges::any_of(layouts, has)) text += formatted("{}{}", text.empty() ? "" : ", ", name);
  return text.empty() ? "one rank" : text;
}
inline std::string to_string(const Model& m) {
  std::string text = formatted("{} in {}, {} embeddings", m.family, m.dtype, m.tied ? "tied" : "untied");
  if (m.heads > 0) text += formatted(", {} heads on {} key-value heads", m.heads, m.kv_heads);
  if (m.length != seq_len) text += formatted(", sequences of {}", m.length);
  if (m.layers != few_layers) text += formatted(", {} layers", m.layers);
  return text;
}

// Every layout of this many ranks; tensor or context parallelism and pipelines only for a model that can be divided.
// Empty if the ranks cannot share a step equally. After a layout that begins() come those with the same bits.
inline std::vector<Layout> layouts(int ranks, const ModelConfig* shared_out = nullptr) {
  std::vector<Layout> all;
  auto zero_layouts = [&](int readers, const TensorParallel& tensor) {
    for (int replicas = 1; replicas <= readers; ++replicas)
      for (const GradReduce reduce : {GradReduce::step, GradReduce::micro})
        for (int stage = 0; stage <= 3; ++stage) {
          if (sequences % readers != 0 || readers % replicas != 0) continue;
          if (tensor.ranks > 1 && readers == 1 && (reduce == GradReduce::micro || stage % 3 != 0))
            continue;  // would repeat a layout
          Layout layout{{.stage = stage, .grad_reduce = reduce, .shards = readers / replicas, .replicas = replicas},
                        tensor};
          all.push_back(layout);
          layout.tensor.overlap = tensor.ranks > 1;
          if (layout.tensor.overlap && stage % 3 == 0) all.push_back(layout);
        }
  };
  // Every context-parallel layout of a model whose sequences can be cut; the stages in between are tested elsewhere.
  auto context_layouts = [&](const ModelConfig& m) {
    for (int cp = 2; cp <= ranks; ++cp)
      for (int tp = 1; tp <= ranks / cp; ++tp) {
        if (ranks % (cp * tp) != 0 || m.n_positions % (2 * cp) != 0 || !can_share_out(m, tp)) continue;
        const TensorParallel tensor = tensor_parallel(m, tp);
        const int readers = ranks / (cp * tp);
        for (const ContextAttention attention : all_values<ContextAttention>()) {
          if (attention == ContextAttention::ulysses && !can_share_heads(model_of_rank(m, tensor), cp)) continue;
          for (int replicas = 1; replicas <= readers; ++replicas)
            for (const int stage : {0, 3})
              if (sequences % readers == 0 && readers % replicas == 0)
                all.push_back({{.stage = stage, .shards = readers / replicas * cp, .replicas = replicas},
                               tensor,
                               ContextParallel{cp, attention}});
        }
      }
  };
  // Every schedule, with as many stages as the ranks allow, of data- and of tensor-parallel ranks.
  auto pipeline_layouts = [&](const ModelConfig& m) {
    for (int pp = 2; pp <= ranks; ++pp)
      for (int tp = 1; tp <= 2; ++tp) {
        const int readers = ranks / (pp * tp);
        if (ranks % (pp * tp) != 0 || sequences % readers != 0 || !can_share_out(m, tp)) continue;
        for (const int stage : {0, 3})
          for (const Schedule schedule :
               {Schedule::gpipe, Schedule::one_f_one_b, Schedule::interleaved, Schedule::zb_h1, Schedule::zb_v}) {
            const int chunks = has_chunks(schedule) ? 2 : 1;
            if (pp * chunks > m.n_layer || (stage == 3 && schedule == Schedule::gpipe)) continue;
            all.push_back(
                {{.stage = stage, .shards = readers}, tensor_parallel(m, tp), {}, {}, {schedule, pp, chunks}});
          }
      }
  };
  // Expert, tensor, context and pipeline parallelism, alone and together, for a model with experts.
  auto expert_layouts = [&](const ModelConfig& m) {
    for (const int pp : {1, 2})
      for (const int cp : {1, 2})
        for (const int tp : {1, 2}) {
          const int readers = ranks / (pp * cp * tp);
          if (ranks % (pp * cp * tp) != 0 || sequences % readers != 0) continue;
          const TensorParallel tensor = tensor_parallel(m, tp);
          for (const int64_t ep : divisors(readers * cp * tp)) {
            if (m.experts.count % ep != 0) continue;
            for (const int stage : {0, 2, 3}) {
              const Schedule schedule = pp == 1      ? Schedule::one_f_one_b
                                        : stage == 0 ? Schedule::gpipe
                                                     : Schedule::zb_h1;
              all.push_back({{.stage = stage, .shards = readers * cp},
                             tensor,
                             ContextParallel{cp},
                             expert_parallel(m, ep),
                             {schedule, pp}});
            }
          }
        }
  };
  auto tensor_layouts = [&](const ModelConfig& m) {
    for (int tp = 2; tp <= ranks; ++tp)
      for (const bool sequence : {true, false})
        if (ranks % tp == 0 && can_share_out(m, tp)) zero_layouts(ranks / tp, tensor_parallel(m, tp, sequence));
  };
  if (shared_out == nullptr) {
    zero_layouts(ranks, {});
    for (const GradReduce reduce : {GradReduce::step, GradReduce::micro})
      for (const DpSync sync : all_values<DpSync>())
        if (sequences % ranks == 0 && ranks > 1 && sync != DpSync::all_reduce)
          all.push_back({{.grad_reduce = reduce, .shards = ranks, .sync = sync}});
  } else if (shared_out->experts.count > 0) {
    expert_layouts(*shared_out);
  } else if (shared_out->n_layer != few_layers) {
    pipeline_layouts(*shared_out);
  } else if (shared_out->n_positions != seq_len) {
    context_layouts(*shared_out);
  } else {
    tensor_layouts(*shared_out);
  }
  return all;
}

// A model, and the layouts in which it is compared with one rank: those of one rank, then of two, and so on.
struct ModelLayouts {
  Model model;
  std::vector<Layout> layouts;
};

// Every layout of at most this many ranks. layouts_of(ranks, model): replaces layouts().
inline std::vector<ModelLayouts> all_layouts(int max_ranks, const std::vector<Model>& models = all_models(),
                                             std::vector<Layout> (*layouts_of)(int ranks,
                                                                               const ModelConfig*) = layouts) {
  std::vector<ModelLayouts> all;
  for (const Model& model : models) {
    const ModelConfig config = model.config();
    ModelLayouts m{model, {}};
    for (int ranks = 1; ranks <= max_ranks; ++ranks)
      for (const Layout& layout : layouts_of(ranks, model.heads > 0 ? &config : nullptr)) m.layouts.push_back(layout);
    if (!m.layouts.empty()) all.push_back(std::move(m));
  }
  return all;
}
inline int64_t count_layouts(const std::vector<ModelLayouts>& models) {
  return std::accumulate(models.begin(), models.end(), int64_t{0},
                         [](int64_t n, const ModelLayouts& m) { return n + std::ssize(m.layouts); });
}

// The choices that make up this model in this layout, except the dtype: "family gpt2", "stage 3".
inline std::vector<std::string> choices(const Model& model, const Layout& l) {
  return {formatted("family {}", model.family),
          model.tied ? "tied" : "untied",
          formatted("heads {} on {}", model.heads, model.kv_heads),
          formatted("sequences of {}", model.length),
          formatted("ranks {}", l.ranks()),
          formatted("dp {}", l.readers()),
          formatted("replicas {}", l.zero.replicas),
          formatted("stage {}", l.zero.stage),
          formatted("reduce {}", l.zero.grad_reduce),
          formatted("{}", l.zero.sync),
          formatted("tp {}{}{}", l.tensor.ranks, l.tensor.sequence ? " by rows" : "",
                    l.tensor.overlap ? " overlapped" : ""),
          formatted("head copies {}", l.tensor.head_copies),
          formatted("cp {} {}", l.context.ranks, l.context.attention),
          formatted("pp {} {} in {} chunks", l.pipeline.stages,
                    l.pipeline.stages > 1 ? name_of(l.pipeline.schedule) : "", l.pipeline.chunks_per_stage),
          formatted("ep {}", l.expert.ranks)};
}

// A subset that contains every pair of choices in `all`: most faults that only a combination reveals need just two
// choices (Kuhn, Wallace and Gallo, 2004). In random order, a layout with a new pair is kept, along with the first of
// its kind, with which it must agree bit for bit. fp32 and bf16 have pairs of their own: their bounds differ by a
// factor of 1,000, so bf16 alone hardly tests a pair.
inline std::vector<ModelLayouts> every_pair(const std::vector<ModelLayouts>& all) {
  struct Place {
    size_t model, layout;
    auto operator<=>(const Place&) const = default;
  };
  struct Drawn {
    Place place, first;
  };
  std::vector<Drawn> drawn;
  for (size_t t = 0; t < all.size(); ++t)
    for (size_t i = 0, first = 0; i < all[t].layouts.size(); ++i) {
      const Layout& layout = all[t].layouts[i];
      if (begins(layout)) first = i;
      CHECK(layout.ranks() == all[t].layouts[first].ranks(), "no layout begins those of {} ranks", layout.ranks());
      drawn.push_back({{t, i}, {t, first}});
    }
  const Philox rng(7, "layouts of the self-test");
  for (size_t i = drawn.size(); i > 1; --i) std::swap(drawn[i - 1], drawn[rng.bits(i) % i]);

  std::set<std::tuple<DType, std::string, std::string>> tried;
  std::set<Place> kept;
  const auto tries_new = [&](const Place& place) {
    const auto before = tried.size();
    const auto& [model, layouts_of_model] = all[place.model];
    const std::vector<std::string> values = choices(model, layouts_of_model[place.layout]);
    for (auto a = values.begin(); a != values.end(); ++a)
      for (auto b = a + 1; b != values.end(); ++b) tried.emplace(model.dtype, *a, *b);
    return tried.size() > before;
  };
  for (const Drawn& d : drawn)
    if (tries_new(d.place)) {
      kept.insert(d.place);
      kept.insert(d.first);
      tries_new(d.first);
    }
  std::vector<ModelLayouts> some;
  for (size_t t = 0; t < all.size(); ++t) {
    ModelLayouts m{all[t].model, {}};
    for (size_t i = 0; i < all[t].layouts.size(); ++i)
      if (kept.contains({t, i})) m.layouts.push_back(all[t].layouts[i]);
    if (!m.layouts.empty()) some.push_back(std::move(m));
  }
  return some;
}

inline StepConfig step_config(const ModelConfig& model, DType dtype, int64_t batch_size, Layout layout) {
  layout.expert = expert_parallel(model, layout.expert.ranks);
  layout_faults(layout, model).refuse();
  return {.model = model,
          .precision = dtype,
          .batch = {batch_size, model.n_positions},
          .micro_batches = sequences / batch_size / layout.readers(),
          .layout = layout,
          .documents = model.n_positions == seq_len ? Documents::together : Documents::apart,
          .experts = model.experts.count == 0
                         ? ExpertOptions()
                         : ExpertOptions{.aux_loss = 0.1, .z_loss = 0.01, .capacity_factor = 1.1, .imbalance = 0.5}};
}
// A micro-batch that ranks share has few sequences, since each costs many exchanges; its rows are not a multiple of the
// tensor-parallel ranks.
inline StepConfig step_config(const ModelConfig& model, DType dtype, const Layout& layout) {
  int64_t batch_size = layout.ranks() == layout.readers() ? 1 : layout.tensor.ranks == 3 ? 2 : 3;
  if (sequences % (batch_size * layout.readers()) != 0) batch_size = 1;
  return step_config(model, dtype, batch_size, layout);
}
inline StepConfig step_config(const ModelConfig& model, DType dtype, int64_t batch_size, const ZeroConfig& zero) {
  return step_config(model, dtype, batch_size, Layout{zero});
}

}  // namespace llmc::selftest
