// machines.h: machines to plan for, by name or from a file, as JSON. A file may change some members of another machine:
// {"like": "h100x8", "op_us": 5}.
#pragma once

#include "core/dtype.h"
#include "core/json.h"
#include "core/words.h"
#include "device/machine.h"

namespace llmc {

// How a run uses each server of a machine without GPUs: its ranks are threads of one process.
struct ServerUse {
  int64_t ranks = 1;
  int64_t threads = 0;  // of all of them together; 0: one for each core
};

namespace detail {

// Peaks, memory and links are the datasheets'; memory_gib is what the driver reports as total. What is reached of them:
//   product_share: of the best product that anybody found (A100 271, H100 792, B200 1745 TFLOP/s: Bekman, "Machine
//     Learning Engineering", maximum achievable matmul FLOPS), 83%, which was fitted: with it the plans of
//     Megatron-LM's Table 1 take as long as published, but for a few percent (dev/results/plans.md). Clocks sink under
//     load. Of the H200: fitted to three models on one of them, and to two in fp8 (dev/results/gpu-h200.md); of the
//     H100 in fp8, where none was measured, in the same proportion.
//   share of a link: NCCL's bus bandwidth in all-reduces of 1 GiB and more, about 230 GB/s with NVLink 3 and 360 with
//     NVLink 4; between servers, 85%.
//   disk_gb_per_s: of a rank's share of the disks of its server, in each of two directions, for --offload-dir; without
//     it, reading and writing take no time.
//   host_update_gb_per_s: that a rank's share of the processors beside its GPU reads and writes in updates, for
//     --offload-update host; without it, they take no time.
//   host_link: PCIe's 16 lanes, in each of two directions; 80% of it is usual for copies of pinned memory.
//   us of a link: a step of NCCL's rings by the protocol LL128, from NCCL's own tables (graph/tuning.cc).
//   attention_share, half_keys, half_channels: FlashAttention-2, forward and backward together, on an A100 (up to 220
//     TFLOP/s) and an H100 (up to 335), by sequence length and channels of a head (Dao 2023, figures 4 to 7).
//   memory_share, op_us, tile_fill: usual values, which no paper prints.
//   watts: of a server at full load, by its datasheet, over its GPUs.
//
// Machines with `cores` have no GPUs: their figures are those of a server, which its ranks share (share_out()). A peak
// is cores x clock x operations of a cycle: fp32 32 with AVX2 or Zen 4, 64 with two units of 512 bits; bf16 twice that
// with AVX-512-BF16, 2,048 with AMX, and as fp32 without either, since it is then multiplied as such. The clock is that
// of all cores where the datasheet has one, otherwise the base. Shares and rates are those of this program's own ops,
// measured on two cores of a Zen 4 (dev/results/cpu-products.md, bench-cpu.md, comm-threads.md), one with AMX
// (plans.md):
//   product_share: products in steps; with AMX they wait for memory.
//   attention_share, half_keys: a third of the peak at 256 tokens, half at 2,048.
//   core_gb_per_s: the bytes that a core goes through in an op; other ops, those with exponentials or roots, reach 7.
//   links: between threads of a process, one core copies; between servers, TCP over 25 Gb/s Ethernet.
inline constexpr const char* machines_text = R"({
"a100x8": {
  "source": "NVIDIA A100 80GB datasheet, SXM; DGX A100: HDR InfiniBand, 200 Gb/s for each GPU",
  "tflops": {"bf16": 312, "tf32": 156, "fp32": 19.5}, "memory_gib": 80, "memory_gb_per_s": 2039,
  "links": [{"ranks": 8, "gb_per_s": 300, "share": 0.77, "us": 1.9}, {"gb_per_s": 25, "share": 0.85, "us": 4}],
  "product_share": 0.72, "host_link": {"gb_per_s": 32, "share": 0.8}, "multiprocessors": 108, "tile_fill": 120,
  "attention_share": 0.75, "half_keys": 200, "half_channels": 20,
  "memory_share": 0.85, "op_us": 3, "watts": 812},
"a100-40x8": {
  "like": "a100x8", "source": "NVIDIA A100 40GB datasheet, SXM; DGX A100", "memory_gib": 40, "memory_gb_per_s": 1555},
"h100x8": {
  "source": "NVIDIA H100 datasheet, SXM; DGX H100: NDR InfiniBand, 400 Gb/s for each GPU",
  "tflops": {"fp8": 1979, "bf16": 989.5, "tf32": 494.7, "fp32": 66.9}, "memory_gib": 79.6, "memory_gb_per_s": 3350,
  "links": [{"ranks": 8, "gb_per_s": 450, "share": 0.8, "us": 1.9}, {"gb_per_s": 50, "share": 0.85, "us": 4}],
  "product_share": {"fp8": 0.5, "bf16": 0.66, "fp32": 0.66}, "host_link": {"gb_per_s": 64, "share": 0.8}, "multiprocessors": 132, "tile_fill": 200,
  "attention_share": 0.45, "half_keys": 300, "half_channels": 40,
  "memory_share": 0.85, "op_us": 3, "watts": 1275},
"h200x8": {
  "like": "h100x8", "source": "NVIDIA H200 datasheet, SXM; DGX H200: NDR InfiniBand, 400 Gb/s for each GPU",
  "memory_gib": 140.4, "memory_gb_per_s": 4800, "product_share": {"fp8": 0.55, "bf16": 0.76, "fp32": 0.76}},
"b200x8": {
  "like": "h100x8", "source": "NVIDIA DGX B200 datasheet: NDR InfiniBand, 400 Gb/s for each GPU",
  "tflops": {"bf16": 2250, "tf32": 1125, "fp32": 75}, "memory_gib": 179, "memory_gb_per_s": 8000,
  "links": [{"ranks": 8, "gb_per_s": 900, "share": 0.8, "us": 1.9}, {"gb_per_s": 50, "share": 0.85, "us": 4}],
  "product_share": 0.64, "multiprocessors": 148, "watts": 1790},
"gb200x72": {
  "like": "b200x8", "source": "NVIDIA GB200 NVL72 datasheet: NDR InfiniBand, 400 Gb/s for each GPU",
  "tflops": {"bf16": 2500, "tf32": 1250, "fp32": 80}, "memory_gib": 185, "memory_gb_per_s": 8000,
  "links": [{"ranks": 72, "gb_per_s": 900, "share": 0.8, "us": 1.9}, {"gb_per_s": 50, "share": 0.85, "us": 4}],
  "multiprocessors": 152, "watts": 1670},
"l40sx8": {
  "like": "a100x8", "source": "NVIDIA L40S datasheet; PCIe 4, two network cards of 200 Gb/s for 8 GPUs",
  "tflops": {"bf16": 362.05, "tf32": 183, "fp32": 91.6}, "memory_gib": 44.99, "memory_gb_per_s": 864,
  "links": [{"ranks": 8, "gb_per_s": 32, "share": 0.6, "us": 5}, {"gb_per_s": 6.25, "share": 0.85, "us": 8}],
  "multiprocessors": 142, "watts": 600},
"rtx4090x8": {
  "like": "l40sx8", "source": "NVIDIA Ada GPU Architecture whitepaper; PCIe 4 through the host; 25 Gb/s Ethernet for 8 GPUs",
  "tflops": {"bf16": 165.2, "tf32": 82.6, "fp32": 82.6}, "memory_gib": 23.99, "memory_gb_per_s": 1008,
  "links": [{"ranks": 8, "gb_per_s": 32, "share": 0.3, "us": 8}, {"gb_per_s": 0.39, "share": 0.85, "us": 20}],
  "multiprocessors": 128, "watts": 600},
"rtx4080x8": {
  "like": "rtx4090x8", "source": "NVIDIA Ada GPU Architecture whitepaper: GeForce RTX 4080 16GB; PCIe 4 through the host; 25 Gb/s Ethernet for 8 GPUs",
  "tflops": {"bf16": 97.5, "tf32": 48.7, "fp32": 48.7}, "memory_gib": 15.99, "memory_gb_per_s": 716.8,
  "multiprocessors": 76, "watts": 470},
"v100x8": {
  "like": "a100x8", "source": "NVIDIA V100 datasheet, SXM2 32GB; DGX-1: EDR InfiniBand, 50 Gb/s for each GPU",
  "tflops": {"fp32": 15.7}, "memory_gib": 32, "memory_gb_per_s": 900,
  "links": [{"ranks": 8, "gb_per_s": 150, "share": 0.8, "us": 1.9}, {"gb_per_s": 6.25, "share": 0.85, "us": 4}],
  "host_link": {"gb_per_s": 16, "share": 0.8}, "multiprocessors": 80, "watts": 437},
"cpux64": {
  "source": "AMD EPYC 9554 datasheet: 64 cores, 3.75 GHz together, AVX-512, 12 channels of DDR5-4800; 25 Gb/s Ethernet",
  "cores": 64, "tflops": {"bf16": 15.4, "fp32": 7.7}, "memory_gib": 384, "memory_gb_per_s": 460.8,
  "links": [{"ranks": 1, "gb_per_s": 3, "us": 30}, {"gb_per_s": 3.125, "share": 0.9, "us": 50}],
  "product_share": 0.8, "attention_share": 0.55, "half_keys": 140, "memory_share": 0.8,
  "core_gb_per_s": {"others": 7, "adamw_update": 30, "zero": 17, "square_sum": 17, "copy": 17, "add_to": 17,
                    "residual_forward": 14}},
"cpu-avx2x64": {
  "like": "cpux64", "source": "AMD EPYC 7763 datasheet: 64 cores, 2.45 GHz, AVX2, 8 channels of DDR4-3200; 25 Gb/s Ethernet",
  "tflops": {"bf16": 5, "fp32": 5}, "memory_gib": 256, "memory_gb_per_s": 204.8},
"cpu-amxx56": {
  "like": "cpux64", "source": "Intel Xeon Platinum 8480+ datasheet: 56 cores, 2 GHz, AVX-512 and AMX, 8 channels of DDR5-4800; 25 Gb/s Ethernet",
  "cores": 56, "tflops": {"bf16": 229, "fp32": 7.17}, "memory_gib": 256, "memory_gb_per_s": 307.2,
  "product_share": {"bf16": 0.1, "fp32": 0.8}, "attention_share": {"bf16": 0.06, "fp32": 0.55}}
})";

inline const nlohmann::json& known_machines() {
  static const nlohmann::json machines = parse_json(machines_text, "machines.h");
  return machines;
}
inline std::vector<std::string> machine_names() {
  std::vector<std::string> names;
  for (const auto& [name, machine] : known_machines().items()) names.push_back(name);
  return names;
}

// A machine as JSON, with the members of the one that it is like. `where`: the name or file, for errors.
inline nlohmann::json whole_machine(const std::string& where, nlohmann::json own) {
  CHECK(own.is_object(), "--machine {}: not an object with the members of a machine", shown(where));
  if (!own.contains("like")) return own;
  CHECK(own["like"].is_string() && known_machines().contains(own["like"].get<std::string>()),
        "--machine {}: like {}: use one of {}", shown(where), shown(own["like"].dump()), machine_names());
  const std::string like = own["like"];
  own.erase("like");
  nlohmann::json whole = whole_machine(like, known_machines()[like]);
  whole.update(own);
  return whole;
}

// Reads the members of a machine; names what is wrong.
class MachineReader {
 public:
  MachineReader(std::string where, const nlohmann::json& json) : where_(std::move(where)), json_(json) {}

  // use: of each server, if the machine has no GPUs
  Machine read(DType dtype, bool tf32, const ServerUse& use = {}) {
    Machine m;
    m.name = where_;
    if (json_.contains("source")) {
      CHECK(json_["source"].is_string(), "--machine {}: source is {}, not a text", shown(where_),
            shown(json_["source"].dump()));
      m.source = json_["source"];
    }
    read_peak(m, dtype, tf32);
    m.memory_bytes = number(json_, "memory_gib", 0, 0) * (1 << 30);
    m.bytes_per_s = number(json_, "memory_gb_per_s", positive) * 1e9;
    read_links(m);
    if (!json_.contains("cores"))
      m.host_bytes_per_s = host_rate(
          json_.value("host_link", nlohmann::json{{"gb_per_s", 32}, {"share", 0.8}}));  // PCIe 4, if it does not say
    m.disk_bytes_per_s = number(json_, "disk_gb_per_s", 0, 0) * 1e9;
    m.host_update_bytes_per_s = number(json_, "host_update_gb_per_s", 0, 0) * 1e9;
    m.share_links = true;
    if (json_.contains("rails")) {
      CHECK(json_["rails"].is_boolean(), "--machine {}: rails is {}: use true or false", shown(where_),
            shown(json_["rails"].dump()));
      m.rails = json_["rails"];
    }
    m.product_share = share("product_share", dtype);
    if (json_.contains("product_share") && json_["product_share"].contains("fp8"))
      m.fp8_flops_per_s *= number(json_["product_share"], "fp8", positive) / m.product_share;
    m.units = static_cast<int64_t>(number(json_, "multiprocessors", 0, 0));
    m.tile_fill = number(json_, "tile_fill", 0, 0);
    m.attention_share = share("attention_share", dtype);
    m.half_keys = number(json_, "half_keys", 0, 0);
    m.half_channels = number(json_, "half_channels", 0, 0);
    m.score_bytes = number(json_, "score_bytes", 0, 0);
    m.memory_share = number(json_, "memory_share", positive, 1);
    m.op_s = number(json_, "op_us", 0, 0) * 1e-6;
    m.watts = number(json_, "watts", 0, 0);
    require_known(json_, split("source cores tflops memory_gib memory_gb_per_s links host_link host_update_gb_per_s "
                               "disk_gb_per_s rails product_share multiprocessors tile_fill attention_share half_keys "
                               "half_channels score_bytes memory_share op_us core_gb_per_s watts",
                               ' '));
    if (json_.contains("cores")) share_out(m, use);
    return m;
  }

 private:
  static constexpr double positive = 1e-12;

  double number(const nlohmann::json& of, const char* name, double least,
                std::optional<double> if_missing = std::nullopt) const {
    if (!of.contains(name) && if_missing) return *if_missing;
    CHECK(of.contains(name), "--machine {}: {} is missing", shown(where_), name);
    const nlohmann::json& value = of[name];
    CHECK(value.is_number() && value.get<double>() >= least && value.get<double>() <= 1e15,
          "--machine {}: {} is {}: use a number{}", shown(where_), name, shown(value.dump()),
          least > 0 ? " above 0" : " of at least 0");
    return value.get<double>();
  }
  double host_rate(const nlohmann::json& link) const {
    CHECK(link.is_object(), "--machine {}: host_link is not an object with gb_per_s and share", shown(where_));
    require_known(link, {"gb_per_s", "share"});
    return number(link, "gb_per_s", positive) * number(link, "share", positive, 1) * 1e9;
  }
  // A share of the peak: a number, or one for each dtype.
  double share(const char* name, DType dtype) const {
    if (!json_.contains(name) || !json_[name].is_object()) return number(json_, name, positive, 1);
    require_known(json_[name], {"fp8", "bf16", "fp32"});
    return number(json_[name], dtype == DType::bf16 ? "bf16" : "fp32", positive);
  }
  void require_known(const nlohmann::json& of, const std::vector<std::string>& known) const {
    for (const auto& [name, value] : of.items())
      CHECK(std::ranges::find(known, name) != known.end(), "--machine {}: {} is no member of a machine: use {}",
            shown(where_), shown(name), known);
  }
  // Makes the figures of a server those of one of its ranks. Its memory stays whole.
  void share_out(Machine& m, const ServerUse& use) const {
    m.cores = static_cast<int64_t>(number(json_, "cores", 1));
    CHECK(use.threads <= m.cores, "--threads {}: a server of --machine {} has {} cores: use at most that many",
          use.threads, shown(where_), m.cores);
    const double ranks = static_cast<double>(use.ranks),
                 cores = static_cast<double>(use.threads > 0 ? use.threads : m.cores) / ranks;  // of a rank
    m.flops_per_s *= cores / static_cast<double>(m.cores);
    m.bytes_per_s /= ranks;
    m.watts /= ranks;
    m.one_at_a_time = true;
    if (m.links.size() > 1) m.links.front().ranks = use.ranks;
    for (size_t t = 1; t < m.links.size(); ++t) m.links[t].bytes_per_s /= ranks;
    const double of_memory = m.bytes_per_s * m.memory_share;
    const nlohmann::json rates = json_.value("core_gb_per_s", nlohmann::json::object());
    CHECK(rates.is_object(), "--machine {}: core_gb_per_s is not an object of ops and their rates", shown(where_));
    for (const auto& [op, rate] : rates.items()) {
      const double of_cores = number(rates, op.c_str(), positive) * 1e9 * cores;
      if (op == "others") m.memory_share *= std::min(1.0, of_cores / of_memory);
      else m.measured[op] = {.call = m.op_s, .byte = 1 / std::min(of_cores, of_memory)};
    }
  }
  void read_peak(Machine& m, DType dtype, bool tf32) const {
    CHECK(json_.contains("tflops") && json_["tflops"].is_object(),
          "--machine {}: tflops is missing, an object with bf16, tf32 or fp32", shown(where_));
    const nlohmann::json& tflops = json_["tflops"];
    require_known(tflops, {"fp8", "bf16", "tf32", "fp32"});
    const char* of = dtype == DType::bf16 ? "bf16" : tf32 ? "tf32" : "fp32";
    CHECK(tflops.contains(of),
          "--machine {}: tflops has no {}: such a processor cannot compute this run; use another --dtype, or another "
          "machine",
          shown(where_), of);
    m.flops_per_s = number(tflops, of, positive) * 1e12;
    m.fp8_flops_per_s = number(tflops, "fp8", 0, 0) * 1e12;
  }
  void read_links(Machine& m) const {
    if (!json_.contains("links")) return;
    const nlohmann::json& links = json_["links"];
    CHECK(links.is_array() && !links.empty() && links.size() <= 8, "--machine {}: links is not a list of 1 to 8 tiers",
          shown(where_));
    m.links.clear();
    for (size_t t = 0; t < links.size(); ++t) {
      CHECK(links[t].is_object(), "--machine {}: links has {}, which is not an object", shown(where_),
            shown(links[t].dump()));
      require_known(links[t], {"ranks", "gb_per_s", "share", "us"});
      const bool last = t + 1 == links.size();
      LinkTier tier;
      if (!last || links[t].contains("ranks")) tier.ranks = static_cast<int64_t>(number(links[t], "ranks", 1));
      if (last) tier.ranks = LinkTier{}.ranks;
      CHECK(t == 0 || tier.ranks > m.links.back().ranks, "--machine {}: links: {} ranks after {}: each tier joins more",
            shown(where_), tier.ranks, m.links.back().ranks);
      tier.bytes_per_s = number(links[t], "gb_per_s", positive) * number(links[t], "share", positive, 1) * 1e9;
      tier.latency_s = number(links[t], "us", 0, 0) * 1e-6;
      m.links.push_back(tier);
    }
  }

  std::string where_;
  const nlohmann::json& json_;
};

// A machine of the table with processors, with another number of cores: a larger or smaller part of the same server.
inline void set_cores(nlohmann::json& machine, int cores) {
  const double times = cores / machine["cores"].get<double>();
  machine["cores"] = cores;
  for (auto& peak : machine["tflops"]) peak = peak.get<double>() * times;
  for (const char* member : {"memory_gib", "memory_gb_per_s"}) machine[member] = machine[member].get<double>() * times;
}

// From a file, or of the table with any number of GPUs (h100x4) or cores (cpux16; cpu: as in the table) per server.
inline nlohmann::json machine_json(const std::string& name) {
  if (name.ends_with(".json")) return whole_machine(name, read_json(name));
  for (const std::string& row : machine_names())
    if (row.substr(0, row.rfind('x')) == name)
      if (nlohmann::json machine = whole_machine(row, known_machines()[row]); machine.contains("cores")) return machine;
  const size_t x = name.rfind('x');
  const std::string count = x == name.npos ? "" : name.substr(x + 1);
  const bool counted = !count.empty() && count.size() <= 4 && count.find_first_not_of("0123456789") == count.npos &&
                       std::stoi(count) > 0;
  std::string known;
  for (const std::string& row : machine_names())
    if (counted && row.substr(0, row.rfind('x')) == name.substr(0, x)) known = row;
  CHECK(!known.empty(), "--machine {}: use one of {}, with any number of GPUs or cores per server, or a FILE.json",
        shown(name), machine_names());
  nlohmann::json json = whole_machine(known, known_machines()[known]);
  if (json.contains("cores")) set_cores(json, std::stoi(count));
  else json["links"][0]["ranks"] = std::stoi(count);
  return json;
}

}  // namespace detail

// The machine that --machine names, for a run in this dtype. Throws Error that names what is wrong.
inline std::shared_ptr<const Machine> choose_machine(const std::string& name, DType dtype, bool tf32,
                                                     const ServerUse& use = {}) {
  const nlohmann::json json = detail::machine_json(name);
  return std::make_shared<const Machine>(detail::MachineReader(name, json).read(dtype, tf32, use));
}
// Can it compute in bf16? Older GPUs cannot.
inline bool has_bf16(const std::string& name) { return detail::machine_json(name)["tflops"].contains("bf16"); }

}  // namespace llmc
