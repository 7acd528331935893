// report.h: what the user sees before a run, the header: machine, model, data, ranks, memory, batch arithmetic; and the
// table of --profile after it.
#pragma once
#if __has_include("build_info.h")
#include "build_info.h"  // written by the Makefile
#endif

#include "comm/connected_processes.h"
#include "comm/world.h"
#include "core/environment.h"
#include "core/files.h"
#include "core/log.h"
#include "model/presets.h"
#include "ops/ops_attention.h"
#include "run/job.h"
#include "run/options/print.h"
#include "run/recipe/print_stages.h"
#include "run/reports/peak.h"
#include "text/tokenizer.h"

#ifndef TRAIN_GPT_GIT_HASH
#define TRAIN_GPT_GIT_HASH "unknown"
#define TRAIN_GPT_COMPILER "unknown compiler"
#define TRAIN_GPT_FLAGS ""
#endif

namespace llmc {

// The same on every machine that runs this program, with these libraries.
inline std::string build_text() {
  return formatted("train_gpt {}\ncompiler: {}\nflags: {}\ndevices: {}\nprocesses: TCP, {}", TRAIN_GPT_GIT_HASH,
                   TRAIN_GPT_COMPILER, TRAIN_GPT_FLAGS,
                   built_for_gpus ? formatted("cpu, cuda ({})", nccl_version()) : std::string("cpu"), mpi_version());
}
inline std::string version_text() { return build_text() + "\nmatmul: " + matmul_library({}); }

namespace detail {

// Whether JSON text, a number or a list of numbers, contains this one.
inline bool holds_number(const std::string& json, const std::string& number) {
  const nlohmann::json value = try_parse_json(json).value_or(nullptr);
  const auto is_it = [&](const nlohmann::json& one) { return one.dump() == number; };
  return value.is_array() ? std::any_of(value.begin(), value.end(), is_it) : is_it(value);
}

// Notices about a tokenizer that is probably not the data's, or not the one that transformers would use.
inline std::vector<std::string> tokenizer_notices(const Options& o, const ModelConfig& model,
                                                  const Tokenizer& tokenizer, const TokenShards* train) {
  if (o.tokenizer == "auto" && dynamic_cast<const ByteTokenizer*>(&tokenizer) &&
      model.vocab_size != ByteTokenizer::vocab_size)
    return {
        formatted("notice: no tokenizer is known for this vocabulary of {}: prompts are taken as bytes, and tokens "
                  "that are not bytes are shown as numbers; name one with --tokenizer{}",
                  model.vocab_size, model.vocab_size == 50257 ? " (data/write_tokenizer.py writes GPT-2's)" : "")};
  std::vector<std::string> notices;
  std::vector<int32_t> sample;
  if (train != nullptr) train->read(0, 0, 1, std::numeric_limits<int64_t>::max(), sample);
  if (!sample.empty() && train->document_mark(0) == DocumentMark::end_of_text_before &&
      sample[0] != tokenizer.end_of_text())
    notices.push_back(
        formatted("notice: the training data begin with token {}, not with the tokenizer's end of text, {}: were they "
                  "made with another tokenizer?",
                  sample[0], tokenizer.end_of_text()));
  const auto ends = model.special_tokens.find("eos_token_id");
  if (const std::string end = formatted("{}", tokenizer.end_of_text());
      ends != model.special_tokens.end() && knows_tokens(o, tokenizer, model) && !holds_number(ends->second, end))
    notices.push_back(
        formatted("notice: the model's config.json says that texts end with token {}, and its tokenizer with {}: "
                  "transformers' generate() will stop at the former; with --tokenizer {} checkpoints say the latter",
                  ends->second, end, shell_word(o.model)));
  if (model.family.model_type == std::string("qwen2") && (o.tokenizer != "auto" || model_preset(o.model)))
    notices.push_back(
        "notice: transformers' AutoTokenizer takes the tokenizer of qwen2 checkpoints for Qwen's own, which splits "
        "differently: load it with PreTrainedTokenizerFast");
  return notices;
}

// When the run saves.
inline std::string checkpoints_text(const Options& o) {
  const double minutes = o.minutes_between_checkpoints();
  std::string text = o.checkpoint_every == 1  ? "every step, "
                     : o.checkpoint_every > 0 ? formatted("every {} steps, ", o.checkpoint_every)
                                              : "";
  if (minutes > 0)
    text += formatted("{} minute{} after the last one (two such are kept), ", minutes, minutes == 1 ? "" : "s");
  text += "at the end and when it is stopped";
  if (o.schedule == Schedule::pipedream)
    text += "; none by the clock: pipedream empties its pipeline to save, which changes what it learns";
  return text;
}

// Says how much of a source is never trained on, if that is more than a hundredth.
inline std::string unused_notice(const Sources::Source& source) {
  const TokenShards& shards = source.shards;
  const auto [tokens, short_files] = shards.unused();
  if (source.packed || tokens <= shards.tokens() / 100) return "";
  return formatted(
      "notice: {}: {} of {} tokens ({:.3g}%) are in no sample, which has {} + 1 tokens of one file: {}; a shorter "
      "--seq-len or larger files lose fewer",
      train_option(source.name), human_count(tokens), human_count(shards.tokens()),
      100 * static_cast<double>(tokens) / static_cast<double>(shards.tokens()), shards.seq_len(),
      short_files > 0 ? formatted("{} of {} file(s) are shorter", human_count(short_files), human_count(shards.count()))
                      : std::string("the ends of files are left over"));
}

// Notices about data that can be trained on but are probably a mistake.
inline void report_unlikely_data(Log& log, const StepConfig& step, const RunData& data) {
  const int64_t samples = step.tokens() / step.batch.T, V = step.model.vocab_size,
                all = data.train.samples() * (data.train.block() / step.batch.T);
  if (samples > all)
    log.line(formatted("notice: a step takes {} samples but the training data have {}: it uses some more than once",
                       samples, all));
  for (const Sources::Source& source : data.train.all())
    if (const std::string notice = unused_notice(source); !notice.empty()) log.line(notice);
  int32_t largest = 0;
  int64_t tokens = 0;
  std::vector<int32_t> sample;
  constexpr int64_t looked_at = 64;
  for (const Sources::Source& source : data.train.all())
    for (int64_t i = 0; i < std::min(looked_at, source.shards.samples()); ++i) {
      source.shards.read_sample(i, std::numeric_limits<int64_t>::max(),
                                sample);  // training refuses tokens outside the vocabulary
      largest = std::max(largest, *std::max_element(sample.begin(), sample.end()));
      tokens += std::ssize(sample);
    }
  if (tokens > 0 && look_like_bytes(largest, V))
    log.line(
        formatted("notice: the first tokens of the training data look like bytes, but the model has a vocabulary of "
                  "{}: for bytes --vocab-size 257 is enough",
                  V));
  if (look_like_fewer(largest, tokens, V))
    log.line(formatted(
        "notice: the largest of the first {} tokens of the training data is {}, and the model has a vocabulary of {}: "
        "were they made with a smaller tokenizer? --tokenizer names it, and a new model takes its vocabulary from it",
        human_count(tokens), largest, V));
  std::set<FileIdentity> trained;  // whatever their paths
  for (const std::string& path : data.train.paths()) trained.insert(identity_of(path));
  for (const ValidationSet& set : data.val)
    for (const std::string& path : set.shards.paths())
      if (trained.contains(identity_of(path))) {
        log.line(formatted("notice: {} is also training data: the validation loss will look too good", path));
        break;
      }
}

// "best-fit: 0.21% padded; 3.1% of 1,234 documents cut, 0% of tokens dropped"
inline std::string packing_text(Packing how, const PackingCounts& counts, int64_t T) {
  const auto percent = [](int64_t part, int64_t whole) {
    return 100 * static_cast<double>(part) / static_cast<double>(std::max<int64_t>(1, whole));
  };
  return formatted("{}: {:.3g}% padded; {:.3g}% of {} documents cut, {:.3g}% of tokens dropped", how,
                   percent(counts.padded, counts.rows * T), percent(counts.cut, counts.documents),
                   human_count(counts.documents), percent(counts.dropped, counts.tokens));
}

// A row for each source, and for each stage of several.
inline void add_data_rows(Rows& rows, const Job& job) {
  const Course& course = job.course;
  const Options& o = job.options;
  const std::vector<int64_t> epoch_tokens = job.data->train.epoch_tokens();
  const bool one = !course.recipe().staged && epoch_tokens.size() == 1;
  if (!course.recipe().staged) {
    const int64_t tokens = course.tokens();
    const double epochs = static_cast<double>(tokens) / static_cast<double>(epoch_tokens[0]);
    rows.emplace_back("steps", formatted("{} ({}) = {} tokens{}", job.max_steps, length_text(o), human_count(tokens),
                                         one ? formatted(" = {} epochs", human_amount(epochs)) : ""));
  } else {
    rows.emplace_back("steps", formatted("{} = {} tokens, in {} stages (--stages {})", job.max_steps,
                                         human_count(course.tokens()), course.recipe().stages.size(), o.stages));
  }
  const Stretch& now = job.stretch();
  const std::vector<SourcePosition> end = course.sources_after(course.steps());
  for (size_t s = 0; s < job.data->train.size(); ++s) {
    const Sources::Source& source = job.data->train[s];
    const int64_t samples = source.blocks() * (job.data->train.block() / o.seq_len);
    rows.emplace_back(
        source.name.empty() ? "training data" : "source " + source.name,
        formatted("{}: {} shard(s) ({}), {} tokens, {} samples of {}{}{}{}", source.pattern, source.shards.count(),
                  name_of(source.shards.format(0)), human_count(source.shards.tokens()), human_count(samples),
                  o.seq_len, o.shuffled() ? ", shuffled" : ", in file order",
                  source.name.empty() ? "" : formatted(", {:.4g}%", 100 * share_of_source(now, s)),
                  one ? "" : formatted(", {} epochs by the end", human_amount(course.epochs(s, end[s])))));
    if (source.packed) rows.emplace_back("packing", packing_text(o.pack, source.packed->counts(), o.seq_len));
  }
}

// How tensors travel between the ranks, and why --comm auto chose this way.
inline std::string transport_text(const Options& o, Backend backend) {
  const bool chosen = o.comm == CommChoice::automatic, several = o.place.processes > 1;
  const std::string within =
      o.place.local_ranks > 1 && several ? "; within a process, through its memory" : std::string();
  switch (backend) {
    case Backend::threads: return "through the process's memory, thread to thread";
    case Backend::nccl: return "by " + nccl_version() + (chosen ? ", because each rank has its own GPU" : "");
    case Backend::mpi: return "by " + mpi_version() + (chosen ? ", which started them" : "") + within;
    case Backend::tcp:
      return "by TCP" + std::string(chosen ? ", because MPI, which is faster, has not started them" : "") + within;
  }
  throw Error("no such transport");
}

// A line for each rank, or, if there are many, for each process.
inline std::vector<std::pair<std::string, std::string>> rank_rows(const Options& o, const Mesh& mesh) {
  std::vector<std::pair<std::string, std::string>> rows;
  const int local = static_cast<int>(o.place.local_ranks);
  const auto where = [&](int rank) {
    return o.place.processes == 1 ? std::string() : "on " + o.place.host_of_process[static_cast<size_t>(rank / local)];
  };
  constexpr int most = 16;
  if (mesh.size() <= most)
    for (int rank = 0; rank < mesh.size(); ++rank) {
      const std::string coordinates = mesh.coordinates(rank), host = where(rank);
      rows.emplace_back(formatted("rank {}", rank), coordinates + (host.empty() ? "" : ", ") + host);
    }
  for (int first = 0, end = 0; mesh.size() > most && first < mesh.size(); first = end) {
    for (end = first + 1; end < mesh.size() && where(end) == where(first); ++end) continue;
    rows.emplace_back(formatted("ranks {}-{}", first, end - 1),
                      formatted("{} to {} {}", mesh.coordinates(first), mesh.coordinates(end - 1), where(first)));
  }
  return rows;
}

}  // namespace detail

// Where the ranks are, and how they exchange tensors.
inline void report_ranks(Log& log, const Options& o, const Device& device, Backend backend, const Mesh& mesh) {
  const std::string who = o.place.processes == 1
                              ? std::string("threads of this process")
                              : formatted("{} processes of {} rank{} each, started by {}", o.place.processes,
                                          o.place.local_ranks, o.place.local_ranks == 1 ? "" : "s", o.place.started_by);
  log.table(formatted("ranks: {}; tensors go {}", who, detail::transport_text(o, backend)), detail::rank_rows(o, mesh));
  if (backend == Backend::nccl)
    for (const std::string& notice : nccl_notices()) log.line(notice);
  if (device.kind == DeviceKind::cuda && backend != Backend::nccl)
    log.line("notice: ranks share GPUs, or this build has no NCCL: every exchange waits for the GPU: correct but slow");
}

// A speed of so many flops a second: "989.5 TFLOP/s".
inline std::string flops_text(double flops_per_s) { return human_flops(flops_per_s) + "/s"; }

// Of all ranks of the run; --peak-tflops is that of one GPU, or of one process on CPUs.
inline Peaks peaks_of_run(const Job& job) {
  const Options& o = job.options;
  const Device device = working_device(job.device, o.place);
  const double factor = devices_in_use(device, o);
  Peaks peaks = find_peaks(device, job.step.precision.products, o.peak_tflops).times(factor);
  if (o.peak_tflops && factor != 1) peaks.source += formatted(", {:.4g} x {}", factor, *o.peak_tflops);
  if (o.profile) peaks.bandwidth = measure_bandwidth(rank_device(job.device, o.place));
  return peaks;
}

// Of ranks of a process that are more than its --threads.
inline std::string more_ranks_notice(int64_t ranks, int64_t threads, int64_t processors) {
  if (ranks <= threads) return "";
  if (ranks <= processors)
    return formatted("notice: {} ranks have a thread each, though --threads is {}", ranks, threads);
  return formatted("notice: {} ranks, of a thread each, share {}: fine for tests and for learning, not faster than {}",
                   ranks, counted(processors, "processor"), counted(processors, "rank"));
}

inline void report_header(Log& log, const Job& job, const Peaks& peaks) {
  const Options& o = job.options;
  const StepConfig& step = job.step;
  const Device& device = job.device;
  Rows rows = {{"machine", formatted("{}: {}", host_name(), describe(device))},
               {"matmul", formatted("{}, {}, peak {} measured here", matmul_library(device), o.dtype,
                                    flops_text(peaks.measured))},
               {"MFU", peaks.promised ? formatted("a share of {}: {}", flops_text(*peaks.promised), peaks.source)
                                      : formatted("n/a: {}; set it with --peak-tflops", peaks.source)}};
  if (device.kind == DeviceKind::cuda)
    if (const auto chip = gpu_peaks(gpu_info(device.gpu).name)) rows.emplace_back("datasheet", describe(*chip));
  if (device.kind == DeviceKind::cuda) rows.emplace_back("CUDA", gpu_environment());
  const Options told = with_warmup(job.course.recipe().stages[job.stretch().stage], o);
  for (auto& row : detail::run_rows(told, step)) rows.push_back(std::move(row));
  detail::add_data_rows(rows, job);
  rows.emplace_back("documents", job.document_begin ? formatted("masked from each other within a sequence; {}",
                                                                mark_text(job.data->train[0].shards.document_mark(0),
                                                                          *job.document_begin))
                                                    : std::string("attend to each other within a sequence"));
  if (job.data->val.empty()) rows.emplace_back("validation data", "none");
  for (const ValidationSet& set : job.data->val)
    rows.emplace_back(set.name.empty() ? "validation data" : "validation " + set.name,
                      formatted("{}{} shard(s), {} tokens", set.name.empty() ? o.val_data + ": " : "",
                                set.shards.count(), human_count(set.shards.tokens())));
  rows.emplace_back("output", o.out_dir);
  rows.emplace_back("checkpoints", detail::checkpoints_text(o));
  log.table("train_gpt " TRAIN_GPT_GIT_HASH, rows);
  if (o.place.started_by.starts_with("one process,")) log.line("notice: this is " + o.place.started_by);
  if (step.layout.ranks() > 1) report_ranks(log, o, device, job.backend, step.layout.mesh());
  if (step.layout.zero.sync != DpSync::all_reduce) detail::report_links(log, step);
  detail::report_memory(log, step, job.plan);
  const auto notice = [&](const std::string& text) {
    if (!text.empty()) log.line(text);
  };
  notice(copies_notice(o, job.plan));
  detail::report_unlikely_data(log, step, *job.data);
  for (const std::string& text : job.data->notices) notice("notice: " + text);
  std::ranges::for_each(detail::tokenizer_notices(o, step.model, *job.tokenizer, &job.data->train[0].shards), notice);
  notice(detail::depth_notice(o));
  std::ranges::for_each(attention_notices(device, step.precision.products, step.model.head_size), notice);
  if (device.kind != DeviceKind::cpu) return;  // the rest is about processors
  const int64_t ranks = o.place.local_ranks;
  const std::string crowded =
      detail::crowded_notice(o.place, std::max<int64_t>(ranks, device.threads), available_processors());
  notice(crowded);
  if (crowded.empty()) notice(more_ranks_notice(ranks, device.threads, available_processors()));
  if (const std::optional<std::string> unbound = environment_variable(unbound_variable)) {
    const std::vector<std::string> names = split(*unbound, ' ');
    notice(formatted("notice: {} {} left out: otherwise all ranks and streams would share one processor",
                     either(names, "and"), names.size() == 1 ? "is" : "are"));
  }
  if (o.dtype == WeightType::bf16 && cpu::isa_in_use() < cpu::Isa::avx512_bf16)
    notice(
        "notice: this processor has no bf16 products, or --cpu-isa leaves them out: they are widened to fp32, correct "
        "but slow");
}

// The time of each op in a rank's training steps, from the first to the last one, the longest first, and the share of
// its roof that it reached: the time that its flops take at the matmul peak, or its bytes at the measured speed of
// memory, whichever is longer. All ranks may multiply at once, each with its share of that peak; one may use memory
// alone, and only a cache can beat its speed.
inline void report_profile(Log& log, const OpLedger& ops, int64_t first, int64_t last, const Peaks& roof) {
  const int64_t steps = last - first + 1;
  std::vector<std::pair<std::string, OpTotals>> sorted(ops.begin(), ops.end());
  std::sort(sorted.begin(), sorted.end(),
            [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
  double total = 0;
  for (const auto& [name, t] : sorted) total += t.seconds;
  Rows rows;
  for (const auto& [name, t] : sorted)
    rows.emplace_back(name,
                      formatted("{:8.3f} ms/step {:5.1f}% {:7} calls {:9.1f} GFLOP/s {:7.1f} GB/s {:5.1f}% of roof",
                                t.seconds * 1e3 / static_cast<double>(steps), 100 * t.seconds / total, t.calls / steps,
                                t.flops * 1e-9 / t.seconds, t.bytes * 1e-9 / t.seconds,
                                100 * std::max(t.flops / roof.measured, t.bytes / roof.bandwidth) / t.seconds));
  log.table(formatted("ops per rank, steps {} to {}; roof: {} of matmul, {:.1f} GB/s of memory, measured here", first,
                      last, flops_text(roof.measured), roof.bandwidth * 1e-9),
            rows);
}

}  // namespace llmc
