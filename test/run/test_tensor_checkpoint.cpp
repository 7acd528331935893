// Checkpoints of tensor-parallel ranks, which hold boxes of the parameters, and of context-parallel ones, which divide
// the optimizer state as data-parallel ones do: any layout reads what any other wrote, bit for bit (contract 6). The
// ranks only hold state; nothing is trained.
#include <mutex>
#include <set>

#include "catch2.h"
#include "helpers.h"
#include "run/known_state.h"
#include "run/ranks.h"
#include "run/selftest/layouts.h"

using namespace llmc;

namespace {

// Sizes that 2, 4 and 8 ranks divide, but for the vocabulary; 8 query heads, in Llama's families on 2 key-value heads.
ModelConfig small_model(const char* family, bool tied, int64_t vocab_size = 97) {
  ModelConfig m;
  m.family = *find_family(family);
  const bool grouped = m.family.norm == Norm::rmsnorm;
  m.n_layer = 2;
  m.n_head = 8;
  m.n_kv_head = grouped ? 2 : 8;
  m.head_size = 2;
  m.n_embd = m.family.own_head_size ? 10 : m.q_size();
  m.n_ffn = 24;
  m.vocab_size = vocab_size;
  m.n_positions = 7;
  m.tied = tied;
  m.experts = selftest::awkward_model(family).experts;
  if (m.family.experts == ExpertFields::one_width) m.experts.width = m.n_ffn;
  return m;
}

struct LayoutCase {
  int tp = 1, shards = 1, stage = 0, replicas = 1, cp = 1;  // cp ranks are among the shards
  std::string text() const {
    return formatted("tp {}, {} shards, stage {}, {} replicas, cp {}", tp, shards, stage, replicas, cp);
  }
};

// f(state, stream) on every rank of a layout.
template <class F>
void on_ranks(const ModelConfig& model, DType dtype, const LayoutCase& layout, F&& f) {
  Layout all{.zero = {.shards = layout.shards, .replicas = layout.replicas},
             .tensor = {.ranks = layout.tp},
             .context = {.ranks = layout.cp}};
  all.zero.set_stage(layout.stage);
  all.expert = expert_parallel(model, 1);
  World world(all.mesh(), Backend::threads, poison_hooks);
  run_ranks(world, [&](int rank) {
    const Device device{DeviceKind::cpu, 1};
    Arena arena(device, (1 << 20) + 24 * count_parameters(parameter_table(model))), scratch(device, 1 << 20);
    arena.poison_free();
    Stream stream(device, scratch);
    const auto join = [&](const std::string& name, const auto& group) { return world.join(rank, name, group); };
    Groups groups(all, rank, device, join, world.hooks());
    ModelState state(part_of(parameter_table(model), all.tensor, groups.me.tensor), dtype, all.zero, groups, arena);
    f(state, stream);
    for (Stream* s : {&stream, &groups.reduce_stream(), &groups.gather_stream()}) s->synchronize();
  });
}

// Writes a checkpoint with these numbers. Ranks that are not the first to have a part have others: only the first one's
// may be written.
void write_known(const ModelConfig& model, DType dtype, const LayoutCase& layout, const std::string& out,
                 int64_t step) {
  on_ranks(model, dtype, layout, [&](ModelState& state, Stream& stream) {
    for (const StateEntry& e : state.state_table())
      for_each_value(e, [&]<class T>(T& element, T value) { element = e.param->first_copy ? value : T(-1.0f); });
    CheckpointWrite(out, step, model, state, stream, {.trainer = {{"seq_len", 7}}}).publish();
  });
}

// Reads it; returns what is wrong.
std::set<std::string> read_known(const ModelConfig& model, DType dtype, const LayoutCase& layout,
                                 const std::string& path) {
  std::set<std::string> wrong;
  std::mutex mutex;
  on_ranks(model, dtype, layout, [&](ModelState& state, Stream& stream) {
    load_checkpoint(path, model, state, stream);
    stream.synchronize();
    std::lock_guard lock(mutex);
    for (const StateEntry& e : state.state_table())
      for_each_value(e, [&]<class T>(const T& element, T value) {
        if (std::memcmp(&element, &value, sizeof(T)) != 0) wrong.insert(detail::what_of(e));
      });
    if (layout.stage == 3) return;
    const Tensor embedding = state.front().weight("wte.weight");  // (padded rows, C)
    const int64_t held = state.front().spec().params[0].box().numel();
    const Tensor padding = embedding.slice(held, {embedding.numel() - held});
    if (std::count(padding.bytes, padding.bytes + padding.size_bytes(), std::byte{0}) != padding.size_bytes())
      wrong.insert("padding of the vocabulary");
  });
  return wrong;
}

void require_exchangeable(const ModelConfig& model, DType dtype, const std::vector<LayoutCase>& layouts) {
  const TempDir dir;
  int64_t step = 0;
  for (const LayoutCase& writer : layouts) {
    INFO(model.family.model_type << ", " << name_of(dtype) << ", written with " << writer.text());
    write_known(model, dtype, writer, dir.path(), ++step);
    const std::string path = checkpoint_path(dir.path(), step);
    REQUIRE_FALSE(checkpoint_fault(path));
    REQUIRE(weights_of(path) == weights_of(checkpoint_path(dir.path(), 1)));
    const int owners = writer.shards;  // without ZeRO, too: each writes some of what all have
    REQUIRE(files_of(path, "optimizer-").size() == static_cast<size_t>(owners * writer.tp));
    for (const LayoutCase& reader : layouts) {
      INFO("read with " << reader.text());
      REQUIRE(read_known(model, dtype, reader, path) == std::set<std::string>());
    }
  }
}

}  // namespace

TEST_CASE("any number of tensor-parallel ranks, in any ZeRO stage, reads what any other wrote, bit for bit",
          "[run][tp][checkpoint]") {
  const std::vector<LayoutCase> layouts = {
      {}, {.tp = 2}, {.tp = 4}, {.tp = 2, .shards = 2, .stage = 1}, {.tp = 4, .shards = 2, .stage = 3}};
  require_exchangeable(small_model("gpt2", true), DType::bf16, layouts);
  require_exchangeable(small_model("qwen2", false), DType::fp32, layouts);
  require_exchangeable(
      small_model("qwen3", true), DType::bf16,
      {{}, {.shards = 3, .stage = 2}, {.tp = 2, .replicas = 2}, {.tp = 4, .shards = 2, .stage = 2}, {.tp = 8}});
  require_exchangeable(small_model("gpt2", false), DType::fp32, {{}, {.tp = 8}, {.tp = 2, .shards = 3, .stage = 3}});
  ModelConfig six = small_model("llama", false);  // 6 query heads on 3 key-value heads
  six.n_head = 6;
  six.n_kv_head = 3;
  six.n_embd = six.q_size();
  require_exchangeable(six, DType::bf16, {{}, {.tp = 3}, {.tp = 6}});
}

TEST_CASE("models with experts are read bit for bit from what any other layout wrote", "[run][tp][checkpoint]") {
  const std::vector<LayoutCase> layouts = {
      {}, {.tp = 2}, {.tp = 4, .shards = 2, .stage = 3}, {.shards = 3, .stage = 2}};
  require_exchangeable(small_model("mixtral", false), DType::bf16, layouts);
  require_exchangeable(small_model("qwen2_moe", true), DType::fp32, layouts);
  require_exchangeable(small_model("qwen3_moe", true), DType::bf16, {{}, {.tp = 8}, {.tp = 2, .replicas = 2}});
  require_exchangeable(small_model("olmoe", false), DType::fp32, {{}, {.tp = 8}, {.tp = 2, .shards = 3, .stage = 1}});
}

TEST_CASE("any number of context-parallel ranks, in any ZeRO stage, reads what any other wrote, bit for bit",
          "[run][tp][checkpoint]") {
  require_exchangeable(small_model("qwen3", true), DType::bf16,
                       {{},
                        {.shards = 2, .cp = 2},
                        {.shards = 4, .stage = 3, .cp = 4},
                        {.tp = 2, .shards = 4, .stage = 3, .cp = 2},
                        {.tp = 2, .shards = 4, .stage = 2},
                        {.shards = 4, .stage = 1, .replicas = 2, .cp = 2}});
  require_exchangeable(small_model("gpt2", false), DType::fp32,
                       {{.tp = 2, .shards = 2, .stage = 3, .replicas = 2, .cp = 2}, {.shards = 3, .stage = 3}, {}});
}

TEST_CASE("ranks whose part of the vocabulary is all padding take part in checkpoints", "[run][tp][checkpoint]") {
  require_exchangeable(small_model("llama", false, 9), DType::bf16,
                       {{}, {.tp = 8}, {.tp = 4, .shards = 2, .stage = 3}});
}

TEST_CASE("slices that are read in several pieces are read whole", "[run][tp][checkpoint]") {
  ModelConfig wide = small_model("gpt2", true);
  wide.n_layer = 1;
  wide.n_ffn = 40'000;  // 640'000 elements; a piece has 262'144
  require_exchangeable(wide, DType::fp32, {{}, {.tp = 2}});
}

TEST_CASE("an optimizer file has its rank's slices: whole rows, or some columns; of copies only the first",
          "[run][tp][checkpoint]") {
  const TempDir dir;
  write_known(small_model("qwen2", true), DType::fp32, {.tp = 4, .shards = 2, .stage = 1}, dir.path(), 1);
  write_known(small_model("qwen2", true), DType::fp32, {.tp = 4}, dir.path(), 2);
  std::map<std::string, std::vector<int>> holders;  // the numbers of the files that have a slice
  for (int number = 1; number <= 4; ++number) {
    const SafetensorsReader file(
        formatted("{}/optimizer-{:05}-of-00004.safetensors", checkpoint_path(dir.path(), 2), number));
    for (const std::string& name : file.names()) holders[name].push_back(number);
  }
  for (const auto& [name, numbers] : holders) {
    INFO(name);
    REQUIRE(numbers.size() == 1);
  }
  for (const auto& [name, number] : {std::pair("wte.weight:moment1[0:400]", 1),
                                     {"wte.weight:moment1[1200:1552]", 4},
                                     {"blocks.1.attn.q.weight:moment1[64:128]", 2},
                                     {"blocks.0.attn.q.bias:moment2[12:16]", 4},
                                     {"blocks.0.attn.k.weight:moment1[0:32]", 1},  // that of the first key-value head
                                     {"blocks.0.attn.k.weight:moment1[32:64]", 3},
                                     {"blocks.0.mlp.down.weight:moment2[:,6:12][0:96]", 2},
                                     {"blocks.0.attn.proj.weight:moment1[:,12:16][0:64]", 4},
                                     {"blocks.1.ln2.weight:moment1[0:16]", 1}}) {
    INFO(name);
    REQUIRE(holders.contains(name));
    REQUIRE(holders[name][0] == number);
  }
  // The numbers of the files go first over the tensor-parallel ranks of a shard.
  const SafetensorsReader file(checkpoint_path(dir.path(), 1) + "/optimizer-00006-of-00008.safetensors");
  for (const std::string& name : file.names())
    if (name.find(":moment1[:,") != name.npos)
      REQUIRE((name.find("[:,4:8]") != name.npos || name.find("[:,6:12]") != name.npos));
}

TEST_CASE("columns in optimizer slices are refused unless they hold every element exactly once",
          "[run][tp][checkpoint]") {
  const TempDir dir;
  const ModelConfig model = small_model("gpt2", true);
  write_known(model, DType::fp32, {}, dir.path(), 1);
  const std::string path = checkpoint_path(dir.path(), 1), file = path + "/optimizer-00001-of-00001.safetensors";
  std::map<std::string, std::vector<float>> whole;
  {
    const SafetensorsReader r(file);
    for (const std::string& name : r.names())
      r.read(name, whole.emplace(name, r.info(name).numel()).first->second.data());
  }
  // Reads the checkpoint with these slices of a matrix of 16 rows and 24 columns instead of all of it.
  const std::string what = "blocks.1.mlp.down.weight:moment2", all = what + "[0:384]";
  struct Part {
    std::string name;
    int64_t column, columns, begin, end;
  };
  auto read_with = [&](const std::vector<Part>& parts) {
    std::map<std::string, std::vector<float>> changed = whole;
    changed.erase(all);
    for (const Part& p : parts) {
      std::vector<float>& values = changed[what + p.name];
      for (int64_t i = p.begin; i < p.end; ++i)
        values.push_back(whole.at(all)[static_cast<size_t>((i / p.columns * 24 + p.column + i % p.columns) % 384)]);
    }
    std::vector<TensorInfo> infos;
    for (const auto& [name, values] : changed)
      infos.push_back({name, DType::fp32, {static_cast<int64_t>(values.size())}});
    SafetensorsWriter w(file, infos);
    for (const auto& [name, values] : changed) w.write(values.data(), static_cast<int64_t>(values.size()) * 4);
    w.finish();
    return read_known(model, DType::fp32, {}, path);
  };
  const Part left{"[:,0:12][0:192]", 0, 12, 0, 192}, right{"[:,12:24][0:192]", 12, 12, 0, 192};
  REQUIRE(whole.at(all).size() == 384);
  REQUIRE(read_with({left, right}).empty());
  REQUIRE(
      read_with(
          {{"[:,1:24][100:368]", 1, 23, 100, 368}, {"[:,0:1][0:16]", 0, 1, 0, 16}, {"[:,1:24][0:100]", 1, 23, 0, 100}})
          .empty());

  REQUIRE_ERROR(read_with({left, {"[:,10:24][0:224]", 10, 14, 0, 224}}),
                what + "[:,10:24][0:224] begins at column 10, but the slices before it end at 12");
  REQUIRE_ERROR(read_with({left, right, {"[:,0:24][0:384]", 0, 24, 0, 384}}),
                "[:,0:24][0:384] begins at column 0, but the slices before it end at 12");
  REQUIRE_ERROR(read_with({left, {"[:,13:24][0:176]", 13, 11, 0, 176}}),
                "begins at column 13, but the slices before it end at 12");
  REQUIRE_ERROR(read_with({right}), "begins at column 12, but the slices before it end at 0");
  REQUIRE_ERROR(read_with({left}), "the slices of " + what + " end at column 12 of 24");
  REQUIRE_ERROR(read_with({left, {"[:,12:25][0:208]", 12, 13, 0, 208}}), "has columns 12 to 25 of 24");
  REQUIRE_ERROR(read_with({left, {"[:,12:999999999999999999][0:208]", 12, 13, 0, 208}}), "of 24, expected fewer");
  REQUIRE_ERROR(read_with({{"[:,0:24][0:384]", 0, 24, 0, 384}}), "has columns 0 to 24 of 24, expected fewer");
  REQUIRE_ERROR(read_with({left, {"[:,0:12][100:192]", 0, 12, 100, 192}, right}),
                "[:,0:12][100:192] begins at element 100, but the slice before it ends at 192");
  REQUIRE_ERROR(read_with({{"[:,0:12][0:100]", 0, 12, 0, 100}, {"[:,0:12][120:192]", 0, 12, 120, 192}, right}),
                "[:,0:12][120:192] begins at element 120, but the slice before it ends at 100");
  REQUIRE_ERROR(read_with({{"[:,0:12][0:100]", 0, 12, 0, 100}, right}),
                "the slices of " + what + "[:,0:12] end at element 100 of 192");
  REQUIRE_ERROR(read_with({left, {"[:,12:24][0:193]", 12, 12, 0, 193}}), "[:,12:24] end at element 193 of 192");
  REQUIRE_ERROR(read_with({{"[0:384]", 0, 24, 0, 384}, left, right}),
                "[:,0:12][0:192] has some columns, but " + all + " has all of them");
  for (const char* name :
       {"[:,0:12][0:192]x", "[:,0:12] [0:192]", "[:,00:12][0:192]", "[:,-1:12][0:192]", "[:,12:12][0:192]",
        "[:,12:0][0:192]", "[: ,0:12][0:192]", "[0:16,0:12][0:192]", "[:,0:12]", "[0:192][:,0:12]",
        "[:,0:12][:,0:12][0:192]", "[:,0:12][0:192", "[:,0:12][192]", "[:,0:12][0:191]"})
    REQUIRE_ERROR(read_with({left, right, {name, 0, 12, 0, 192}}), what + name);
}
