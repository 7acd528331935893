// machine.h: time on paper: how long ops and transfers take on a machine that need not be here, from their shapes; and
// a clock, by which a stream of the null device runs nothing but computes when each op would begin and end and, by its
// events, what overlaps and what waits.
//
// An op is bound by memory or by its arithmetic. A product is cut into tiles, which the multiprocessors of a GPU take
// in waves: a last wave that is not full, edges of tiles outside the matrix, and the time to fill a tile's pipeline are
// lost (NVIDIA, "Matrix Multiplication Background User's Guide"). A transfer is bound by the slowest link on its way.
//
// The clock's model of concurrency is the simplest: every stream has engines of its own, so that ops and transfers of
// different streams do not slow each other down. But where links are shared, collectives of side streams go one after
// another through the tier that bounds them; where streams share processors, whatever they do goes one after another;
// and NCCL begins collectives in the order in which the host enqueues them, whatever their streams (a message between
// two ranks begins at once and waits for the other rank, which delays nobody). The host enqueues in no time; and the
// ranks of a group run in step: a transfer begins as soon as this rank arrives, and takes as long as this rank's own
// bytes.
#pragma once
#include "core/shape.h"

namespace llmc {

// A matrix product: M rows in each group, N columns, K products per element. M 0: not a product.
struct ProductShape {
  int64_t M = 0, N = 0, K = 0, groups = 1;
  bool fp8 = false;
};
// Attention: keys of a sequence, channels of a head, and the scores that a kernel which keeps them in memory writes.
struct AttentionSize {
  int64_t keys = 0, channels = 0;
  double scores = 0;
};
// How a transfer uses the links: a ring of all members, messages between two of them at a time, or all to all.
enum class Pattern : uint8_t { ring, neighbours, all_to_all };

// What bounds a transfer on a machine.
struct LinkPath {
  double bytes_per_s, latency_s;
  size_t tier;  // the slowest
};

// Bytes copied between the memory of a device and that of its host.
struct HostBytes {
  double to_device = 0, to_host = 0;
  double both() const { return to_device + to_host; }
};

// Bytes read from a file, and written to it.
struct FileBytes {
  double read = 0, written = 0;
  double both() const { return read + written; }
};

// The cost of an op, computed from its shapes alone; the null device adds these up.
struct OpCost {
  const char* name;
  double flops = 0;
  double bytes = 0;  // read + written once
  // For a transfer: bytes through this rank's link, in the busier direction, and the number of messages that must
  // follow one another. Known on the null device; no messages: not a transfer.
  double link_bytes = 0;
  int64_t messages = 0;
  ProductShape product = {};
  AttentionSize attention = {};
  Pattern pattern = Pattern::ring;
  const char* group = nullptr;                // its name
  const std::vector<int>* members = nullptr;  // the ranks among which it moves data, ascending; none: neighbours
  const LinkPath* path = nullptr;             // among them, if it was found before
  HostBytes host = {};                        // of a copy between the host's memory and the device
  FileBytes file = {};                        // between a file and the host's memory
};

// What an op was measured to take: seconds of a call, for each byte and for each flop.
struct OpRate {
  double call = 0, byte = 0, flop = 0;
};

// Links that join this many consecutive ranks: those of a server, then those between servers, and so on.
struct LinkTier {
  int64_t ranks = std::numeric_limits<int64_t>::max();
  double bytes_per_s = std::numeric_limits<double>::infinity();  // of each rank, in each of two directions
  double latency_s = 0;                                          // per message
};

// The defaults are those of an ideal machine, whose ops reach the peaks and begin at once.
struct Machine {
  std::string name = {};
  std::string source = {};                     // of the figures
  double flops_per_s = 0;                      // of products, in the dtype of a run
  double fp8_flops_per_s = 0;                  // of those in fp8; 0: as the others
  double bytes_per_s = 0;                      // of memory: reads and writes
  double memory_bytes = 0;                     // of each GPU, or of a server without; 0: unknown
  int64_t cores = 0;                           // of a server without GPUs; 0: it has GPUs
  std::vector<LinkTier> links = {LinkTier{}};  // by growing number of ranks; the last one joins all
  // Does a ring go through the cards of all its members in a server at once, as NCCL's do, or through one?
  bool rails = true;
  double host_bytes_per_s = 0;  // between a GPU and its host's memory, in each of two directions; 0: memory is one
  double host_update_bytes_per_s = 0;  // read and written by a rank's share of processors; 0: unknown, takes no time
  double disk_bytes_per_s = 0;         // of a rank's files, in each of two directions; 0: unknown, and takes no time
  bool share_links = false;            // do collectives of different streams wait for each other?
  // Do the streams of a rank wait for each other, because the same processors do their work?
  bool one_at_a_time = false;
  std::map<std::string, OpRate, std::less<>> measured = {};  // by op; the times of others follow from what is below

  double op_s = 0;             // from the end of an op to the start of the next
  double memory_share = 1;     // of the peak, reached by ops that are bound by memory
  double product_share = 1;    // the same for large products
  int64_t units = 0;           // multiprocessors, each of which computes one tile at a time; 0: no tiles
  double tile_fill = 0;        // what a tile takes beside its products, in steps of K
  double attention_share = 1;  // of the peak, for long sequences and wide heads
  double half_keys = 0;        // keys of a sequence at which attention has half of that
  double half_channels = 0;    // and channels of a head
  double score_bytes = 0;      // attention without flash kernels: bytes moved per score in a forward
  double watts = 0;            // of a rank, with its share of the server and of cooling; 0: unknown

  // The processors beside a GPU, which update what is in host memory.
  Machine host() const {
    Machine processors;
    processors.name = name;
    processors.flops_per_s = std::numeric_limits<double>::infinity();
    processors.bytes_per_s = host_update_bytes_per_s > 0 ? host_update_bytes_per_s : processors.flops_per_s;
    processors.disk_bytes_per_s = disk_bytes_per_s;
    return processors;
  }

  double seconds(const OpCost& c) const {
    if (c.messages > 0) {
      const LinkPath path = path_of(c);
      return static_cast<double>(c.messages) * path.latency_s + c.link_bytes / path.bytes_per_s;
    }
    if (c.file.both() > 0) return disk_bytes_per_s > 0 ? c.file.both() / disk_bytes_per_s : 0;
    if (c.host.both() > 0 && host_bytes_per_s > 0) return op_s + c.host.both() / host_bytes_per_s;
    if (c.flops == 0 && c.bytes == 0) return 0;
    if (const auto m = measured.find(std::string_view(c.name)); m != measured.end())
      return m->second.call + m->second.byte * c.bytes + m->second.flop * c.flops;
    return op_s + std::max(arithmetic_seconds(c), memory_seconds(c));
  }

  // What bounds a transfer. Members whose links join fewer ranks than the group go through the next tier.
  LinkPath path_of(const OpCost& c) const {
    if (c.path != nullptr) return *c.path;
    LinkPath path{links[0].bytes_per_s, links[0].latency_s, 0};
    if (c.members == nullptr || c.members->size() < 2 || links.size() == 1) return path;
    const std::vector<int>& ranks = *c.members;
    const double n = static_cast<double>(ranks.size());
    // A ring's messages pass all of its edges one after another.
    std::vector<double> edges(links.size(), 0);
    for (size_t i = 0; i < ranks.size(); ++i) ++edges[tier_between(ranks[i], ranks[(i + 1) % ranks.size()])];
    path.latency_s = 0;
    for (size_t t = 0; t < links.size(); ++t) path.latency_s += edges[t] / n * links[t].latency_s;
    double within = n;  // members that share a unit of the tier below
    for (size_t t = 1; t < links.size(); ++t) {
      within = static_cast<double>(members_beside_first(ranks, links[t - 1].ranks));
      if (within == n) break;
      double rate = links[t].bytes_per_s;
      if (c.pattern == Pattern::ring && rails) rate *= within;
      if (c.pattern == Pattern::all_to_all) rate *= (n - 1) / (n - within);  // the other members are nearer
      if (rate < path.bytes_per_s) path.bytes_per_s = rate, path.tier = t;
    }
    return path;
  }

 private:
  size_t tier_between(int64_t a, int64_t b) const {
    size_t t = 0;
    while (t + 1 < links.size() && a / links[t].ranks != b / links[t].ranks) ++t;
    return t;
  }
  static int64_t members_beside_first(const std::vector<int>& ranks, int64_t unit) {
    return std::ranges::count_if(ranks, [&](int64_t r) { return r / unit == ranks[0] / unit; });
  }

  double peak_of(const ProductShape& p) const { return p.fp8 && fp8_flops_per_s > 0 ? fp8_flops_per_s : flops_per_s; }
  double memory_seconds(const OpCost& c) const { return c.bytes / (bytes_per_s * memory_share); }
  double arithmetic_seconds(const OpCost& c) const {
    if (c.product.M > 0 && units > 0) return tiled_seconds(c.product);
    if (c.product.M > 0) return c.flops / (peak_of(c.product) * product_share);
    if (c.attention.keys > 0) return attention_seconds(c);
    return c.flops / flops_per_s;
  }

  // By the best of the usual tiles; a sum of many products may be split among tiles that are added up afterwards.
  double tiled_seconds(const ProductShape& p) const {
    struct Tile {
      int64_t rows, columns;
      double share;  // of what the largest tile reaches: smaller ones read more for each product
    };
    double best = std::numeric_limits<double>::infinity();
    constexpr Tile tiles_of_products[] = {
        {256, 128, 1}, {128, 256, 1}, {128, 128, 0.95}, {128, 64, 0.8}, {64, 64, 0.65}};
    for (const Tile& t : tiles_of_products) {
      const int64_t tiles = p.groups * ceil_div(p.M, t.rows) * ceil_div(p.N, t.columns);
      const double of_tile = 2.0 * static_cast<double>(t.rows * t.columns) * static_cast<double>(units) /
                             (peak_of(p) * product_share * t.share);
      for (int64_t parts = 1; parts <= 16; parts *= 2) {
        if (parts > 1 && (p.groups > 1 || tiles * parts / 2 >= 2 * units || p.K / parts < 256)) break;
        const double waves = static_cast<double>(ceil_div(tiles * parts, units));
        const double sums =
            parts == 1 ? 0 : 8.0 * static_cast<double>(p.M * p.N * parts) / (bytes_per_s * memory_share);
        best = std::min(best, waves * of_tile * (static_cast<double>(ceil_div(p.K, parts)) + tile_fill) + sums);
      }
    }
    return best;
  }

  double attention_seconds(const OpCost& c) const {
    const double keys = static_cast<double>(c.attention.keys), channels = static_cast<double>(c.attention.channels);
    const double rate =
        flops_per_s * attention_share * keys / (keys + half_keys) * channels / (channels + half_channels);
    if (score_bytes == 0) return c.flops / rate;
    // Such kernels compute the scores that causal attention masks, too.
    return 2 * c.flops / rate + c.attention.scores * score_bytes / (bytes_per_s * memory_share);
  }
};

// A machine that reaches its peaks, with one kind of link. Infinity: takes no time.
inline std::shared_ptr<const Machine> ideal_machine(double flops_per_s, double bytes_per_s,
                                                    double link_bytes_per_s = std::numeric_limits<double>::infinity(),
                                                    double link_latency_s = 0) {
  CHECK(std::min({flops_per_s, bytes_per_s, link_bytes_per_s}) > 0 && link_latency_s >= 0);
  Machine machine;
  machine.flops_per_s = flops_per_s, machine.bytes_per_s = bytes_per_s;
  machine.links = {{.bytes_per_s = link_bytes_per_s, .latency_s = link_latency_s}};
  return std::make_shared<const Machine>(std::move(machine));
}

// When what a rank's streams share (links by tier, processors) is free again, and whose transfer takes it until then.
struct InUse {
  double until = 0;
  const char* group = nullptr;
};
struct LinkTimes {
  std::map<size_t, InUse> tiers;
  InUse processors;
  bool in_order = false;  // does a collective begin only when those enqueued before it have begun?
  InUse last;             // until the last of them begins
};

// The time of a stream, in seconds. Without a machine it stays 0.
class PaperClock {
 public:
  // links: of a rank. is_side: of a side stream; the transfers of the stream that computes go first
  PaperClock(std::shared_ptr<const Machine> machine, std::shared_ptr<LinkTimes> links, bool is_side)
      : machine_(std::move(machine)), links_(std::move(links)), is_side_(is_side) {}

  // How long an op takes, apart from waits.
  double seconds_of(const OpCost& cost) const { return machine_ ? machine_->seconds(cost) : 0; }
  // Runs an op that takes this long.
  void run(const OpCost& cost, double seconds) {
    if (!machine_) return;
    const bool ordered = links_ && links_->in_order && cost.messages > 0 && cost.pattern != Pattern::neighbours;
    if (ordered) wait(links_->last.until, links_->last.group);
    InUse* const shared = seconds > 0 ? shared_by(cost) : nullptr;
    if (shared != nullptr) wait(shared->until, cost.messages > 0 ? cost.group : shared->group);
    if (ordered) links_->last = {now_, cost.group};
    now_ += seconds;
    if (shared != nullptr) *shared = {now_, cost.messages > 0 ? cost.group : nullptr};
    if (cost.messages > 0 || cost.host.both() > 0 || cost.file.both() > 0) {
      last_transfer_ = cost.group;
      expose(seconds, cost.group);
    }
  }
  // Waits until another stream has reached this time, at the end of a transfer of this group (none: of work).
  void wait(double until, const char* group) {
    if (until <= now_) return;
    expose(until - now_, group);
    now_ = until;
  }

  double now() const { return now_; }
  double exposed() const { return exposed_; }
  // The groups for whose transfers this stream waits, or which it makes itself.
  const std::map<std::string, double>& exposed_by_group() const { return exposed_by_group_; }
  const char* last_transfer() const { return last_transfer_; }

 private:
  // What the op shares with those of other streams; none: nothing.
  InUse* shared_by(const OpCost& cost) {
    if (!links_ || cost.file.both() > 0) return nullptr;
    if (machine_->one_at_a_time) return &links_->processors;
    const bool queues = is_side_ && machine_->share_links && cost.messages > 0 && cost.pattern != Pattern::neighbours;
    return queues ? &links_->tiers[machine_->path_of(cost).tier] : nullptr;
  }
  void expose(double seconds, const char* group) {
    exposed_ += seconds;
    exposed_by_group_[group == nullptr ? "other streams" : group] += seconds;
  }

  std::shared_ptr<const Machine> machine_;
  std::shared_ptr<LinkTimes> links_;
  bool is_side_;
  double now_ = 0, exposed_ = 0;
  std::map<std::string, double> exposed_by_group_;
  const char* last_transfer_ = nullptr;  // the group of this stream's last transfer
};

}  // namespace llmc
