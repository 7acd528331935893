// report.h: what a person sees before and after a run: the header (machine, model, data, memory, batch arithmetic) and
// the summary with the exact commands that come next.
#pragma once
#if __has_include("build_info.h")
#include "build_info.h"  // written by the Makefile
#endif
#include <unistd.h>

#include <string>

#include "core/log.h"
#include "core/options.h"
#include "model/config.h"
#include "train/dataloader.h"
#include "train/peak.h"
#include "train/planner.h"

#ifndef TRAIN_GPT_GIT_HASH
#define TRAIN_GPT_GIT_HASH "unknown"
#define TRAIN_GPT_COMPILER "unknown compiler"
#define TRAIN_GPT_FLAGS ""
#endif

namespace llmc {

inline std::string version_text() {
  return formatted("train_gpt {}\ncompiler: {}\nflags: {}\nmatmul: {}\ndevices: cpu, null", TRAIN_GPT_GIT_HASH,
                   TRAIN_GPT_COMPILER, TRAIN_GPT_FLAGS, cpu::matmul_library());
}

inline std::string host_name() {
  char name[256] = "unknown host";
  gethostname(name, sizeof name - 1);
  return name;
}

// How the tokens of a step come about.
struct BatchPlan {
  int64_t micro_batches;  // of a step
  int64_t tokens;         // of a step
  int64_t max_steps;
};

inline void report_header(Log& log, const Options& o, const Device& device, const ModelConfig& m,
                          const TokenShards& train, const TokenShards* val, const BatchPlan& batch, const Plan& plan,
                          double peak) {
  const int64_t parameters = count_parameters(parameter_table(m));
  log.table(
      "train_gpt " TRAIN_GPT_GIT_HASH,
      {{"machine", formatted("{}: {}, {} threads", host_name(), processor_name(), device.threads)},
       {"matmul", formatted("{}, {}, peak {:.1f} GFLOP/s measured here", cpu::matmul_library(), o.dtype, peak * 1e-9)},
       {"model", formatted("{}: {} layers, {} heads, C {}, F {}, vocabulary {}, {} positions", o.model, m.n_layer,
                           m.n_head, m.n_embd, m.n_ffn, m.vocab_size, m.n_positions)},
       {"parameters",
        formatted("{} ({:.3f} MFLOP a token)", human_count(parameters), training_flops_per_token(m, o.seq_len) * 1e-6)},
       {"training data",
        formatted("{}: {} shard(s), {} tokens, {} samples of {}{}", o.train_data, train.count(),
                  human_count(train.tokens()), human_count(train.samples()), o.seq_len, o.shuffle ? ", shuffled" : "")},
       {"validation data",
        val == nullptr ? "none"
                       : formatted("{}: {} shard(s), {} tokens", o.val_data, val->count(), human_count(val->tokens()))},
       {"batch", formatted("{} tokens a step = {} micro-batch(es) x {} sequences x {} tokens x 1 rank",
                           human_count(batch.tokens), batch.micro_batches, o.batch_size, o.seq_len)},
       {"steps",
        formatted(
            "{} = {} tokens = {:.2f} epochs", batch.max_steps, human_count(batch.max_steps * batch.tokens),
            static_cast<double>(batch.max_steps * (batch.tokens / o.seq_len)) / static_cast<double>(train.samples()))},
       {"optimizer", formatted("AdamW, lr {:.2e} {} after {} warm-up steps, weight decay {}, clip {}", o.lr,
                               o.lr_schedule, o.warmup_steps, o.weight_decay, o.grad_clip)},
       {"output", o.out_dir}});
  std::vector<std::pair<std::string, std::string>> lines;
  for (const MemoryLine& line : plan.memory)
    if (line.bytes > 0) lines.emplace_back(line.label, human_bytes(line.bytes));
  lines.emplace_back("total", human_bytes(plan.total_bytes()));
  log.table("memory", lines);
  if (o.dtype == "bf16" && !cpu::bf16_is_native())
    log.line("notice: no bf16 products in this processor or this build: they are widened to fp32, right but slow");
}

// Where the time of the training steps went, the longest op first.
inline void report_profile(Log& log, const OpLedger& ops, int64_t steps) {
  std::vector<std::pair<std::string, OpTotals>> sorted(ops.begin(), ops.end());
  std::sort(sorted.begin(), sorted.end(),
            [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
  double total = 0;
  for (const auto& [name, t] : sorted) total += t.seconds;
  std::vector<std::pair<std::string, std::string>> rows;
  for (const auto& [name, t] : sorted)
    rows.emplace_back(name, formatted("{:8.3f} ms a step {:5.1f}% {:7} calls {:7.1f} GFLOP/s {:6.1f} GB/s",
                                      t.seconds * 1e3 / static_cast<double>(steps), 100 * t.seconds / total,
                                      t.calls / steps, t.flops * 1e-9 / t.seconds, t.bytes * 1e-9 / t.seconds));
  log.table("ops", rows);
}

inline void report_next_steps(Log& log, const Options& o, const std::string& checkpoint) {
  Options more = o, made;
  more.model = checkpoint;  // which knows its own shape
  more.from_scratch = false;
  more.n_layer = more.n_head = more.n_embd = more.n_ffn = more.vocab_size = std::nullopt;
  more.out_dir = o.out_dir + "-continued";
  made.generate = true;
  made.model = checkpoint;
  made.dtype = o.dtype;
  made.prompt = o.prompt.empty() ? "In the beginning" : o.prompt;
  log.table("next: train on from these weights (the optimizer starts anew), generate, plot",
            {{"train on", command_line(more)},
             {"generate", command_line(made)},
             {"plot", formatted("python3 scripts/plot.py {}", shell_word(o.out_dir))}});
}

}  // namespace llmc
