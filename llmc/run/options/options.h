// options.h: every option, defined once: its name, its allowed values, whether a resumed run may change it, and its
// help. option_fields.h has its value. print.h prints the rows of this list; parse.h reads and checks their values.
#pragma once
#include "core/check.h"
#include "run/options/option_fields.h"
#include "run/options/option_row.h"

namespace llmc {

inline constexpr int64_t usual_val_steps = 20;

// The limit of one dimension. Products of several are bounded by require_countable() in planner.h.
inline constexpr double largest_size = 1 << 24;

// All options in the order of --help, with the values of `o`, which must outlive the rows.
inline std::vector<OptionRow> option_rows(Options& o) {
  using enum ResumeRule;
  std::vector<OptionRow> rows;
  const char* group = "";
  auto add = [&](const char* name, const char* letter, auto& field, Limits limits, ResumeRule rule, const char* help) {
    rows.push_back({group, name, letter, OptionField(field), std::move(limits), rule, help});
  };
  group = "Data";
  add("--train-data", "-i", o.train_data, Limits{}, recipe,
      "files of tokens to train on: a file or a quoted pattern ('data/*_train_*.bin')");
  add("--data", "", o.data, Limits{}, recipe,
      "instead of --train-data, one of several sources, as NAME=PATTERN:WEIGHT, such as 'web=web_*.bin:0.7'; one "
      "--data for each. Weights are proportions of samples; after every step, the count of each source is within one "
      "of its proportion (with more than two, within log2(n) / 2 + 1). NAME=PATTERN:WEIGHT:EPOCHS refuses a run that "
      "would read the source more often than that");
  add("--val-data", "-j", o.val_data, Limits{}, warn, "files of tokens for validation; default: no validation");
  add("--val", "", o.val, Limits{}, warn,
      "instead of --val-data, one of several validation sets, as NAME=PATTERN; one --val for each. Each has a loss of "
      "its own; their mean by tokens is the validation loss");
  add("--data-format", "", o.data_format, any_of<DataFormat>(), must_match,
      "of all training and validation data: llmc: llm.c's token shards; megatron: FILE.bin and its index FILE.idx; "
      "nanogpt: uint16 without a header; olmo: uint32 without a header; auto: llmc or megatron, which can be "
      "recognised");
  add("--stages", "", o.stages, Limits{}, free,
      "a file, .toml or .json, with the stages of the run, each with its length, mix, batch, sequence length and "
      "learning rate (llmc/run/recipe/README.md); what a stage does not say is as the options say. --print-stages "
      "draws them");
  add("--data-changed", "", o.data_changed, any_of<DataChanged>(), free,
      "if the data or the recipe have changed when a run resumes: refuse: end; accept: go on from here with the new "
      "ones. Shards must have as many tokens as before, such as a repaired one; a new mix, other stages or lengths "
      "repeat and skip no sample that was seen: a source is known by its files, whatever its name and their folder; "
      "the log, metrics.jsonl and trainer.json name the changes");
  add("--shuffle", "", o.shuffle, Limits{}, must_match,
      "reshuffle the samples in every epoch; --no-shuffle: file order; default: as before on resume, otherwise "
      "--shuffle");
  add("--mask-documents", "", o.mask_documents, Limits{}, recipe,
      "documents packed into one sequence do not attend to each other, and positions begin at 0 in each; it begins "
      "with the tokenizer's end of text, in nanogpt's and olmo's format after it, in megatron's where the index says");
  add("--pack", "", o.pack, any_of<Packing>(), recipe,
      "how documents fill the training sequences: stream: one after the other, cut wherever a sequence ends; best-fit: "
      "whole documents together, only longer ones cut, with padding that has no loss; document-start: each sequence "
      "begins a document, and what does not fit is dropped. An index of documents is kept in ~/.cache/train_gpt");
  add("--tokenizer", "", o.tokenizer, Limits{}, warn,
      "encodes prompts and decodes samples: bytes, a Hugging Face tokenizer.json (BPE) or its directory, or a "
      "gpt2_tokenizer.bin, which only decodes; auto: the tokenizer.json of a --model directory if the vocabulary has "
      "its tokens, otherwise bytes");
  group = "Model";
  add("--model", "-e", o.model, Limits{}, must_match,
      "gpt2:, gpt3:, llama2:, llama3:, qwen2.5:, qwen3:, smollm2:, mixtral: or olmoe: with a size, such as llama3:8B "
      "or mixtral:8x7B; d<N>: GPT-2 with N layers, N heads, 64 N channels; d<N>-e<E>: Mixtral of these sizes, two of E "
      "experts for each token, as much work as d<N>; or a directory with a Hugging Face config.json (and weights) of "
      "one of these families");
  add("--from-scratch", "", o.from_scratch, Limits{}, must_match, "random weights, even if --model is a directory");
  add("--n-layer", "", o.n_layer, between(1, largest_size), must_match, "layers; default: the model's");
  add("--n-head", "", o.n_head, between(1, largest_size), must_match, "attention heads; default: the model's");
  add("--n-kv-head", "", o.n_kv_head, between(1, largest_size), must_match,
      "key-value heads, each shared by a group of attention heads (not in GPT-2); default: the model's");
  add("--n-embd", "", o.n_embd, between(1, largest_size), must_match,
      "channels; the feed-forward width scales with them; default: the model's");
  add("--n-ffn", "", o.n_ffn, between(1, largest_size), must_match, "feed-forward width; default: the model's");
  add("--vocab-size", "", o.vocab_size, between(1, largest_size), must_match,
      "vocabulary size, 257 for byte tokens; default: the model's; of a preset with a --tokenizer, its number of "
      "tokens");
  add("--init-std", "", o.init_std, between(1e-6, 1), must_match,
      "standard deviation of a new model's weights; of those into the residual stream, this over the root of twice the "
      "layers; with --parametrization, of the base. A narrow model learns faster from about 1 / sqrt(--n-embd); "
      "default: the model's, 0.02");
  add("--rope-theta", "", o.rope_theta, between(1e-3, 1e12), recipe,
      "base of the rotary positions' wavelengths; default: the model's");
  add("--rope-factor", "", o.rope_factor, between(1, 1e6), recipe,
      "stretches long wavelengths of rotary positions by this factor, as Llama 3.1 does, and with them the model's "
      "largest --seq-len; default: the model's");
  group = "Batch";
  add("--batch-size", "-b", o.batch_size, between(1, largest_size), warn,
      "sequences per micro-batch and rank; more take more memory");
  add("--seq-len", "-t", o.seq_len, between(1, largest_size), recipe,
      "tokens per sequence; at most the model's positions");
  add("--total-batch-size", "-d", o.total_batch_size, at_least(1), free,
      "tokens per step, by gradient accumulation; default: one micro-batch of all ranks. A resumed run must keep it, "
      "in any layout, unless --data-changed accept is given");
  group = "Run";
  add("--max-steps", "-x", o.max_steps, at_least(1), warn,
      "number of updates, and so the end of the learning-rate schedule; default: those of one epoch");
  add("--tokens", "", o.tokens, at_least(1), warn,
      "instead of --max-steps, the number of tokens to train on, such as 300M or 10B: as many updates as that takes, "
      "rounded up");
  add("--epochs", "", o.epochs, above_zero(), warn,
      "instead of --max-steps, how often to train on all samples: as many updates as that takes, rounded up");
  add("--out-dir", "-o", o.out_dir, Limits{}, free, "directory for metrics.jsonl and the checkpoints of one run");
  add("--resume", "", o.resume, Limits{}, free,
      "auto: resume from the newest complete checkpoint in --out-dir, or start there; never: refuse an --out-dir that "
      "holds a run; or the directory of a checkpoint to resume from");
  add("--branch-from", "", o.branch_from, Limits{}, free,
      "the directory of a checkpoint from which a run in a new --out-dir continues; give the options of its run, but "
      "--seed, learning rate and schedule, the decays of weights and moments, coefficients of losses, clipping, "
      "skipped outliers and the recipe of data may differ; optimizer state and data position are kept");
  add("--restart", "", o.restart, Limits{}, free,
      "start over where --out-dir holds a run: its directory is renamed to OUT.before-N, nothing is deleted; leave it "
      "out to resume the new run");
  add("--log-every", "", o.log_every, at_least(1), free,
      "updates between lines on the console, which show one update each; metrics.jsonl has a line for every update");
  add("--time-limit", "", o.time_limit, above_zero(), free,
      "minutes after which the run saves and exits with status 75, as on SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and "
      "SIGXCPU");
  add("--seed", "", o.seed, at_least(0), branch, "seed of initial weights, data order and samples");
  add("--overfit-batch", "-a", o.overfit_batch, Limits{}, must_match,
      "train on the first batch only: the loss must fall towards zero");
  group = "Optimizer";
  add("--optimizer", "", o.optimizer, any_of<Optimizer>(), must_match,
      "adamw: two moments for each weight; sgd: momentum alone, like torch.optim.SGD; lion: the sign of a momentum, "
      "half of AdamW's state; muon: the matrices of blocks and experts by an orthogonalised momentum, all other "
      "parameters by AdamW");
  add("--lr", "-l", o.lr, between(0, 100), branch,
      "peak learning rate; Lion's is about a tenth of AdamW's, SGD's far larger");
  add("--warmup-steps", "-u", o.warmup_steps, at_least(0), branch,
      "updates over which the learning rate rises to its peak");
  add("--warmup-tokens", "", o.warmup_tokens, Limits{}, branch,
      "instead of --warmup-steps, the tokens of the warm-up, such as 10M: as many updates as that takes, rounded up");
  add("--lr-schedule", "-k", o.lr_schedule, any_of<LrShape>(), branch,
      "learning rate after the warm-up, down to --final-lr-frac at the last step; 1-sqrt: by the square root of the "
      "share that is done; wsd: constant, then 1-sqrt over the last fifth of the run, or --decay-steps");
  add("--decay-steps", "", o.decay_steps, at_least(1), branch,
      "updates of the decay of --lr-schedule wsd; default: the last fifth of the run");
  add("--decay-tokens", "", o.decay_tokens, at_least(1), branch,
      "instead of --decay-steps, the tokens of the decay: as many updates as that takes, rounded up");
  add("--final-lr-frac", "-q", o.final_lr_frac, between(0, 1), branch,
      "learning rate of the last step, as a fraction of the peak; ignored with --lr-schedule constant");
  add("--weight-decay", "-c", o.weight_decay, between(0, 100), branch,
      "decoupled weight decay, for matrices only, not for biases and norms; with sgd, part of the gradient");
  add("--weight-decay-tokens", "", o.weight_decay_tokens, at_least(1), branch,
      "instead of --weight-decay, its time scale: at the peak learning rate, weights decay by a factor of e over this "
      "many tokens, such as 2B, whatever the batch: the weight decay is the tokens of a step / (--lr x this)");
  add("--decay-embeddings", "", o.decay_embeddings, any_of<OnOff>(), branch,
      "whether the tables of tokens and positions decay like other matrices; a table that is also the output layer is "
      "one of them");
  add("--beta1", "", o.beta1, between(0, 0.9999999), branch,
      "decay of AdamW's first moment; sgd's momentum; the momentum's share in lion's update direction");
  add("--beta2", "", o.beta2, between(0, 0.9999999), branch,
      "decay of AdamW's second moment, or of lion's momentum; default: 0.95, with lion 0.99");
  add("--adam-eps", "", o.adam_eps, between(1e-30, 1), branch, "added to the square root of AdamW's second moment");
  add("--embed-lr", "", o.embed_lr, between(0, 100), branch,
      "peak learning rate of the tables of tokens and positions; default: --lr");
  add("--head-lr", "", o.head_lr, between(0, 100), branch,
      "peak learning rate of an output layer that is not the embedding; default: --lr");
  add("--scalar-lr", "", o.scalar_lr, between(0, 100), branch, "peak learning rate of norms and biases; default: --lr");
  add("--muon-ns", "", o.muon_ns, any_of<NewtonSchulz>(), must_match,
      "coefficients of the five Newton-Schulz steps that orthogonalise a momentum: quintic: the same for all, with "
      "singular values from 0.68 to 1.21; polar-express: each step's own, from 0.85 to 1.15");
  add("--muon-scale", "", o.muon_scale, any_of<MuonScale>(), must_match,
      "size of an orthogonal update: rms: 0.2 sqrt(max(rows, columns)), as large as AdamW's, so that its --lr and "
      "--weight-decay fit; spectral: sqrt(max(1, rows / columns))");
  add("--muon-heads", "", o.muon_heads, any_of<HeadGroups>(), must_match,
      "apart: the rows of the query, key and value weights of each group of heads are a matrix of their own");
  add("--muon-rows", "", o.muon_rows, any_of<MuonRows>(), must_match,
      "normalised: the rows of an orthogonal update are divided by the root of a running mean of their squares, of "
      "decay --beta2, and scaled back together (NorMuon)");
  add("--muon-products", "", o.muon_products, any_of<MuonProducts>(), must_match,
      "dtype of the iteration's products and of what ranks send for it; auto: that of --dtype");
  add("--muon-momentum", "", o.muon_momentum, between(0, 0.9999999), branch, "muon's Nesterov momentum");
  add("--cautious-decay", "", o.cautious_decay, Limits{}, branch,
      "with muon, weights decay only where the update makes them smaller");
  add("--z-loss", "", o.z_loss, between(0, 1000), branch,
      "coefficient of a loss that keeps the output layer's logits from drifting (PaLM): the mean, over tokens, of the "
      "square of log Z, the logarithm of the sum of their exponentials; training minimizes it too, but the reported "
      "and the validation loss leave it out, and z_loss in metrics.jsonl is the mean without this factor; 1e-4 is "
      "usual");
  add("--qk-clip", "", o.qk_clip, above_zero(), branch,
      "largest logit of attention: after an update, the query and key weights of a head that had a larger one shrink, "
      "so that it would have had this one (QK-clip); 100 is usual; default: no limit");
  add("--parametrization", "", o.parametrization, any_of<Parametrization>(), must_match,
      "how initial weights, learning rates, decay and epsilon follow the model's size, so that the --lr that is best "
      "for a small model is best for a large one: standard: they do not; mup: from those of a model with --base-width "
      "on, with the width; completep: also from --base-depth on, with the number of layers");
  add("--base-width", "", o.base_width, between(1, largest_size), must_match,
      "with mup and completep, the --n-embd for which --lr was chosen");
  add("--base-depth", "", o.base_depth, between(1, largest_size), must_match,
      "with completep, the --n-layer for which --lr was chosen");
  add("--base-head-size", "", o.base_head_size, between(1, largest_size), must_match,
      "with mup and completep, the channels of a head for which --lr was chosen; default: the model's, whose width "
      "then lies in the number of heads");
  add("--grad-clip", "", o.grad_clip, at_least(0), branch,
      "largest gradient norm; larger gradients are scaled down to it; 0: no clipping");
  add("--ema", "", o.ema, between(0, 0.9999999), branch,
      "after every update, average the fp32 weights: this much of the average so far and the rest of the new weights "
      "(the first 1 / (1 - DECAY) weights count equally). Each validation has a second loss with the averages, and "
      "each checkpoint a folder ema with them, a model for --model; 4 bytes per parameter, sharded like the "
      "optimizer's state; 0.999 is usual; default: none");
  add("--noise-scale", "", o.noise_scale, Limits{}, free,
      "estimate the gradient noise scale (McCandlish et al. 2018), in tokens: batches far below it waste no samples, "
      "and far above it no time; from the norms of the gradients of data-parallel ranks, or with --grad-reduce micro "
      "of micro-batches, before they are added up, which are read once more for it. In metrics.jsonl noise_scale is "
      "the ratio of the averages, over about 100 updates, of noise_trace and noise_square");
  const Limits some_deviations = above_zero("; leave it out to skip none");
  add("--skip-loss-z", "", o.skip_loss_z, some_deviations, branch,
      "a loss is a spike if it is more than this many standard deviations above the mean of the last 128 that were "
      "none (in this stage); default: never");
  add("--skip-grad-z", "", o.skip_grad_z, some_deviations, branch, "the same for the gradient norm");
  add("--on-spike", "", o.on_spike, any_of<OnSpike>(), warn,
      "what to do about a spike, which a loss or gradient norm that is not finite always is; its update is never made. "
      "stop: end the run with status 2; skip: go on with the next samples; rollback: return to the last checkpoint of "
      "--checkpoint-every (which it needs), --keep-best or the end of a stage, or to the beginning, and leave out all "
      "samples from there to those of the spike. Default: skip beyond --skip-loss-z and --skip-grad-z, stop where a "
      "number is not finite");
  add("--max-rollbacks", "", o.max_rollbacks, at_least(1), free,
      "with --on-spike rollback, rollbacks in a row, without such a checkpoint between them, after which the next "
      "spike ends the run with status 2");
  group = "Evaluation and samples";
  add("--val-every", "-v", o.val_every, at_least(0), free,
      "updates between validations, besides one at the start and one at the end; 0: no validation");
  add("--val-steps", "-m", o.val_steps, at_least(1), free,
      "size of a validation, in batches of a step's size; its samples are from all of --val-data, and the same every "
      "time, as long as the size of a step and --seq-len stay the same; with several --val, of each; default: 20, with "
      "--evaluate all of them");
  add("--eval-choices", "", o.eval_choices, Limits{}, free,
      "multiple-choice questions to answer with every validation, or with --evaluate, as data/hellaswag.py writes "
      "them; default: none");
  add("--sample-every", "-s", o.sample_every, at_least(0), free, "updates between samples; 0: no samples");
  add("--sample-tokens", "-g", o.sample_tokens, at_least(1), free, "tokens per sample");
  add("--prompt", "", o.prompt, Limits{}, free,
      "text that samples begin with; with --generate, - stands for all of stdin, without the line break at its end");
  add("--prompt-file", "", o.prompt_file, Limits{}, free,
      "with --generate, a file with a prompt in each line; empty lines are left out");
  add("--num-samples", "", o.num_samples, between(1, largest_size), free,
      "with --generate, continuations of each prompt, with --seed, --seed + 1 and so on");
  add("--temperature", "", o.temperature, between(0, 100), free,
      "sampling temperature; 0: always the most likely token");
  add("--top-k", "", o.top_k, at_least(0), free, "sample from the k most likely tokens; 0: from all");
  add("--top-p", "", o.top_p, between(0, 1), free,
      "sample from the fewest most likely tokens that together have this probability");
  group = "Checkpoints";
  add("--checkpoint-every", "-n", o.checkpoint_every, at_least(0), free,
      "updates between checkpoints, besides those of --checkpoint-minutes and the one at the end; 0: no others");
  add("--checkpoint-minutes", "", o.checkpoint_minutes, at_least(0), free,
      "save when this many minutes have passed since the last checkpoint, and keep the two newest of the checkpoints "
      "that only this has saved; 0: never; default: 15, but never with --schedule pipedream, which must empty its "
      "pipeline to save, and then computes something else");
  add("--keep-checkpoints", "", o.keep_checkpoints, at_least(0), free,
      "number of newest checkpoints to keep, not counting those of --checkpoint-minutes alone; older ones are deleted; "
      "0: keep all");
  add("--keep-every", "", o.keep_every, at_least(0), free,
      "never delete checkpoints whose step is a multiple of this; 0: none");
  add("--keep-best", "", o.keep_best, Limits{}, free,
      "save a checkpoint whenever the validation loss is the best so far, keep it, and link OUT/best to it; where "
      "another validation begins (--val-steps), the best is sought anew");
  add("--checkpoint-errors", "", o.checkpoint_errors, any_of<OnFailure>(), free,
      "if a checkpoint cannot be written, as on a full disk: retry: go on, and try again after 1, 2, 4 ... updates; "
      "only the last checkpoint must succeed; fail: end the run");
  add("--checkpoint-mode", "", o.checkpoint_mode, any_of<CheckpointMode>(), free,
      "async: copy what a checkpoint holds to host memory, and write it while training goes on; takes as much memory "
      "as a rank writes or, where there is less, training waits for the rest; the last checkpoint, and those before an "
      "early end, are waited for; sync: all are");
  add("--checkpoint-local", "", o.checkpoint_local, Limits{}, free,
      "a directory on each node's own disk, or in /dev/shm, for checkpoints that are more frequent than those in "
      "--out-dir: each process writes its own part; a start takes the newest checkpoint that is complete, from "
      "wherever its parts are; it may have another name on every node");
  add("--checkpoint-local-every", "", o.checkpoint_local_every, at_least(0), free,
      "updates between checkpoints in --checkpoint-local");
  add("--checkpoint-local-keep", "", o.checkpoint_local_keep, between(1, 1000), free,
      "number of newest checkpoints to keep in --checkpoint-local");
  add("--checkpoint-local-copies", "", o.checkpoint_local_copies, any_of<OnOff>(), free,
      "on: send what is saved in --checkpoint-local to another process, on another host if there is one, which keeps a "
      "copy in its own --checkpoint-local, so that the loss of a node loses nothing");
  add("--check-replicas", "", o.check_replicas, at_least(0), free,
      "updates between comparisons of what ranks hold copies of, weights and optimizer state, bit for bit, besides the "
      "one before each checkpoint; a difference ends the run with status 2; 0: no others");
  add("--verify-updates", "", o.verify_updates, at_least(0), free,
      "updates between comparisons of one unit (a block, say), another one each time, between the ranks that have all "
      "made its update: as --check-replicas, at a fraction of its cost; 0: none");
  add("--check-devices", "", o.check_devices, Limits{}, free,
      "before the first step, time a product and a copy on every rank's device, for some milliseconds, and name ranks "
      "that are much slower than the others");
  group = "Numerics and memory";
  add("--dtype", "", o.dtype, any_of<WeightType>(), must_match,
      "type of weights and activations; gradients and optimizer state are fp32");
  add("--products", "", o.products, any_of<Operands>(), warn,
      "what the linear layers of blocks, and their experts, multiply in training, forward and backward: dtype: numbers "
      "as --dtype stores them; fp8-block: numbers rounded to fp8 (E4M3), in blocks of 128 along the sum, or of 128 x "
      "128 weights, that are scaled by powers of two; fp8: the same, but gradients as E5M2; mxfp8: E4M3 in blocks of "
      "32 along the sum; fp8-tensor: as fp8, but one scale for an operand, so that numbers depend on --batch-size, "
      "without --tp, --cp, --ep and --token-slices. Sums stay fp32, and embedding, head, norms, router and attention "
      "--dtype. On GPUs fp8-block runs on Hopper (compute capability 9.0) with cuBLASLt 12.9; fp8 and fp8-tensor (from "
      "8.9 on), mxfp8 (from 10.0 on) and experts multiply the same numbers as CPUs, but in bf16, which gains no speed");
  add("--fp8-skip", "", o.fp8_skip, one_of({"N", "N,M"}), warn,
      "with --products in fp8: the first N blocks, and the last M, multiply numbers as --dtype stores them; they are "
      "the most sensitive, and few");
  add("--master-weights", "-w", o.master_weights, any_of<MasterWeights>(), must_match,
      "master copy of bf16 weights; split: the same numbers as fp32, kept as the bf16 weights and 16 more bits, which "
      "saves 2 bytes per parameter; none: the optimizer updates the bf16 weights with stochastic rounding, which saves "
      "4");
  add("--moment1-dtype", "", o.moment1_dtype, any_of<MomentType>(), warn,
      "type of AdamW's first moment, or the momentum of Lion and SGD, rounded stochastically: 8bit: E4M3 with a scale "
      "for 64 numbers; saves 2 bytes per parameter (bf16) or 2.94 (8bit)");
  add("--moment2-dtype", "", o.moment2_dtype, any_of<MomentType>(), warn,
      "the same for AdamW's second moment; 8bit: five bits of exponent and three of mantissa, never rounded to 0");
  add("--head-chunks", "", o.head_chunks, between(0, 1 << 20), warn,
      "compute the head in this many chunks of a micro-batch, so that the logits of only one exist at a time; 0: as "
      "few as keep them below 1 GiB");
  add("--recompute", "-r", o.recompute, one_of(all_names<Recompute>(), {"block:N"}), free,
      "what the backward recomputes instead of keeping it: activation functions, also norms, or whole blocks; block:N "
      "keeps the input of only every N-th block, and computes those between forward once more; about the square root "
      "of the blocks of a stage needs least; less memory, more time, the same numbers");
  add("--offload", "", o.offload, one_of({"none"}, all_names<Offloaded>()), free,
      "state that is in pinned host memory, separated by commas: moments of the optimizer, master weights (and --ema's "
      "average), gradients, whose sums each micro-batch adds to, and weights (with --zero-stage 3); also activations, "
      "the inputs of blocks that wait for their backward (with --recompute block); the device has a part of all that "
      "while it is used; the same numbers; less memory, more time on the bus, which --plan states");
  add("--offload-dir", "", o.offload_dir, Limits{}, free,
      "with --offload moments: a directory on a fast disk of each node's own (NVMe), where each rank has its moments "
      "in a file instead of host memory; an update reads and writes them piece by piece; the file has no name, so that "
      "it is gone when the run ends; checkpoints have the moments as always; the same numbers; --plan states its size, "
      "and what a step reads and writes");
  add("--offload-update", "", o.offload_update, any_of<OffloadUpdate>(), warn,
      "who updates moments and masters that are all offloaded; host: its processors: only gradients go there, and "
      "weights come back; a GPU's run then rounds as --cpu-isa does; not with Muon and --qk-clip");
  add("--memory-limit", "", o.memory_limit, between(0, 1 << 30), free,
      "GiB that each rank may use or, on a GPU, the size of each rank's card, 0.5 GiB of which is left to CUDA's "
      "libraries: a run that needs more is refused before it starts; default: the rank's share of the machine's "
      "memory, or of the GPU's free memory");
  group = "Parallelism";
  add("--schedule", "", o.schedule, any_of<Schedule>(), free,
      "order of forwards and backwards; 1f1b needs less memory than gpipe; the others are for pipelines and idle less: "
      "interleaved has more chunks, zb-h1 and zb-v compute weight gradients later. All but pipedream compute the same "
      "numbers; with pipedream every stage updates after each micro-batch without waiting for the others, and clips by "
      "its own norm; its gradients are as many updates old as there are stages after it");
  add("--pp", "", o.pp, between(1, 1 << 10), warn,
      "pipeline parallelism: stages, each with some of the layers, on ranks of their own; for slow links");
  add("--pp-chunks", "", o.pp_chunks, between(1, 1 << 10), free,
      "runs of layers that each stage has with --schedule interleaved; zb-v has 2, the others 1; default: 2 with "
      "interleaved");
  add("--pp-layout", "", o.pp_layout, Limits{}, warn,
      "layers of each stage: even: equal numbers, a remainder spread; balanced: so that the slowest stage is as fast "
      "as possible, by the counted work of the embedding, the layers and the head; or numbers such as 8,10,10,8, one "
      "for each stage, with --pp-chunks one for each chunk, in the order of the model");
  add("--token-slices", "", o.token_slices, Limits{}, warn,
      "a micro-batch passes through the stages in this many slices of its sequences, one after the other; each slice "
      "attends to the keys of those before it (TeraPipe). With long sequences and few micro-batches the bubble is that "
      "many times shorter; products are smaller. auto: the number and the lengths that are best on paper, later slices "
      "shorter; needs gpipe or 1f1b, and no --cp");
  add("--zero-stage", "-z", o.zero_stage, between(0, 3), free,
      "what data-parallel ranks shard: 1 optimizer state, 2 also gradients, 3 also weights; the same numbers at equal "
      "--grad-reduce");
  add("--dp-replicate", "", o.dp_replicate, between(1, 1 << 20), warn,
      "hybrid sharding: number of replicas; each is sharded over its part of the ranks");
  add("--dp-sync", "", o.dp_sync, any_of<DpSync>(), warn,
      "how data-parallel ranks synchronise: all-reduce: in a ring; parameter-server: rank 0 alone keeps the optimizer "
      "state, adds all gradients, updates, and sends the weights to every rank; parameter-server-chain: the weights go "
      "from rank to rank; partitioned-server: every rank is the server of its shard. Servers add in a different order "
      "from the ring, and so round differently; they need --zero-stage 0");
  add("--grad-reduce", "", o.grad_reduce, any_of<GradReduceChoice>(), warn,
      "reduce gradients across ranks once per step, or after every micro-batch, with less memory and more traffic; the "
      "two round differently; auto: as before on resume, otherwise step, or micro from ZeRO stage 2 on");
  add("--reduce-dtype", "", o.reduce_dtype, any_of<WeightType>(), warn,
      "type in which gradients travel between data-parallel ranks: bf16: half the traffic; every rank's part is "
      "rounded to bf16, parts are added in fp32 in rank order, and the sum is rounded to bf16; what accumulates over "
      "micro-batches stays fp32");
  add("--gather-dtype", "", o.gather_dtype, any_of<GatherType>(), warn,
      "how --zero-stage 3 gathers the weights of linear layers in training; fp8: with --products fp8-block or fp8, as "
      "the E4M3 numbers that they multiply, rounded once per update, and scales: half the bytes of bf16, and the same "
      "bits");
  add("--tp", "", o.tp, between(1, 1 << 10), warn,
      "tensor parallelism: ranks that share every layer, each with some of its heads, feed-forward channels and "
      "vocabulary; neighbours, best on the fastest links; the others are data-parallel");
  add("--sequence-parallel", "", o.sequence_parallel, any_of<OnOff>(), warn,
      "with --tp, divide the rows of what lies between the parallel products, such as norms and residuals, among the "
      "ranks, instead of keeping all rows on each: less memory, a quarter more traffic");
  add("--tp-overlap", "", o.tp_overlap, Limits{}, warn,
      "with --tp, cut products into at most four pieces, and exchange one while another is computed; GPUs may round "
      "products of other sizes differently");
  add("--cp", "", o.cp, between(1, 1 << 10), warn,
      "context parallelism: ranks that share every sequence, for long sequences: each rank has two of 2 N equal "
      "slices, an early and a late one, so that all do the same work; 2 N must divide --seq-len; generated text is not "
      "divided");
  add("--cp-attention", "", o.cp_attention, any_of<ContextAttention>(), warn,
      "with --cp, how queries meet the keys of other ranks: ring: keys and values travel from rank to rank during the "
      "computation; all-gather: every rank gathers all of them; ulysses: each rank computes some heads of whole "
      "sequences");
  add("--ep", "", o.ep, between(1, 1 << 10), warn,
      "expert parallelism: ranks that divide the experts of each layer among themselves and send each other tokens: "
      "the ranks of --tp, then those of --cp, then data-parallel ranks of a replica; N must divide the number of all "
      "these and the number of experts");
  group = "Mixture of experts";
  add("--moe-aux-loss", "", o.moe_aux_loss, between(0, 1000), branch,
      "coefficient of a loss that balances the experts; training minimizes it too, but the reported loss leaves it "
      "out. It is the mean, over sequences and layers with experts, of E x the sum over the E experts of f x P, where "
      "f is an expert's share of the choices and P the mean of its probabilities; 1 if all experts are chosen equally "
      "often. transformers takes f and P over the whole batch and all layers, and not per choice: its number is k "
      "times as large for k experts per token. Default: k x router_aux_loss_coef if config.json has "
      "output_router_logits, with which transformers adds it, otherwise 0; 0.01 is usual");
  add("--moe-z-loss", "", o.moe_z_loss, between(0, 1000), branch,
      "coefficient of a loss that keeps the routers' logits small (ST-MoE): the mean, over tokens and layers with "
      "experts, of the square of the logarithm of the sum of their exponentials; 0.001 is usual");
  add("--moe-bias-rate", "", o.moe_bias_rate, between(0, 1), must_match,
      "balances the experts without a loss (DeepSeek-V3): every expert has a bias that counts for the choice, not for "
      "the weight; after every step it rises by this much if the expert was chosen less often than the mean, and falls "
      "if more often; 0.001 is usual; trainer.json keeps the biases for runs that resume or begin with the checkpoint, "
      "--evaluate and --generate; transformers chooses without them; 0: no biases");
  add("--moe-dispatch", "", o.moe_dispatch, any_of<Dispatch>(), must_match,
      "dropless: every expert computes all tokens that chose it, as the families define it; capacity: in training, an "
      "expert takes at most --moe-capacity-factor x T x k / E, rounded up, of the choices of a sequence of T tokens, "
      "in their order, and drops later ones, whose tokens go on without this expert; validation and generation drop "
      "nothing");
  add("--moe-capacity-factor", "", o.moe_capacity_factor, between(0.01, 1e6), must_match,
      "with --moe-dispatch capacity, the most that an expert takes, in multiples of its equal share; default: 1.25");
  add("--moe-imbalance", "", o.moe_imbalance, between(1, 1e6), free,
      "with --ep, a rank has memory for this many times its equal share of tokens; more tokens take further rounds, "
      "which change nothing but the order of sums. With a capacity, if this, or --moe-capacity-factor times the share, "
      "is enough for all tokens that can arrive, the memory is for those, and no host waits for the number of rows");
  group = "Machine";
  add("--local-ranks", "", o.local_ranks, between(0, 1024), warn,
      "ranks as threads of this process; those of a --tp and --cp group share a --batch-size, others have their own; "
      "0: one if there are several processes; otherwise one per visible GPU; on a CPU as few as --tp, --cp, --pp and "
      "--ep need");
  add("--comm", "", o.comm, any_of<CommChoice>(), warn,
      "transport between ranks; auto: NCCL if every rank has its own GPU; otherwise memory within a process, and MPI "
      "between processes that mpirun has started, TCP between others");
  add("--rank", "", o.rank, between(0, largest_size), free,
      "number of this process, from 0; only without a launcher: mpirun, srun and torchrun's variables set it");
  add("--world-size", "", o.world_size, between(1, largest_size), free,
      "number of processes; each has --local-ranks ranks; only without a launcher");
  add("--rendezvous", "", o.rendezvous, Limits{}, free,
      "where the processes meet: HOST:PORT of process 0, or file:PATH on a shared file system; the environment "
      "variable TRAIN_GPT_TOKEN or TRAIN_GPT_TOKEN_FILE has the secret that all of them must know");
  add("--spare", "", o.spare, Limits{}, free,
      "in the place of --rank: this process waits at the rendezvous, beyond the --world-size; when the job starts "
      "again after a failure, it takes the place of a process, other than 0, that stays away. Meanwhile it reads each "
      "new checkpoint, so that it is in the memory of its machine");
  add("--spare-wait", "", o.spare_wait, above_zero(), free,
      "seconds that places are empty, and no process comes, before spares take them; at most half of --init-timeout");
  add("--init-timeout", "", o.init_timeout, above_zero(), free,
      "seconds to wait for all processes to meet, and for their first step");
  add("--comm-timeout", "", o.comm_timeout, above_zero(), free,
      "seconds that the others wait for a rank before they name it and all processes end; from the second step on; "
      "until then, --init-timeout");
  add("--device", "", o.device, any_of<DeviceChoice>(), warn,
      "where to compute; auto: on GPUs if this build and this machine have them");
  add("--attention", "", o.attention, any_of<GpuAttention>(), warn,
      "attention on GPUs: own kernels, or cuDNN's (bf16, in a build with USE_CUDNN=1)");
  add("--gelu", "", o.gelu, any_of<GpuEpilogue>(), warn,
      "GELU on GPUs: own kernels, or cuBLASLt's products in passing (bf16; not with --tp, --products, --recompute "
      "activation or norm)");
  add("--residual", "", o.residual, any_of<GpuEpilogue>(), warn,
      "sums of the residual stream on GPUs: own kernels, or cuBLASLt's products in passing, which round once instead "
      "of twice (not with --tp, --products; experts' outputs are always added by a kernel)");
  add("--cuda-graphs", "", o.cuda_graphs, any_of<OnOff>(), free,
      "on GPUs, launch the forward of a micro-batch, and its backward, as one CUDA graph where ranks do not "
      "communicate: not with --tp or --cp, ZeRO stage 3 or --grad-reduce micro, nor in the last backward of several "
      "ranks");
  add("--tune-matmul", "", o.tune_matmul, Limits{}, warn,
      "before the first step, time cuBLASLt's algorithms for each matrix product and use the fastest; checkpoints "
      "record the choices for resumed runs, and ~/.cache/train_gpt for new ones; runs on two machines may choose, and "
      "round, differently");
  add("--tf32", "", o.tf32, Limits{}, warn,
      "GPUs compute fp32 products on tensor cores with a 10-bit mantissa: faster, less exact than fp32");
  add("--threads", "", o.threads, between(0, 1024), warn,
      "threads of this process, divided among its ranks; OMP_NUM_THREADS is not used; 0: all available processors");
  add("--cpu-isa", "", o.cpu_isa, one_of({"auto"}, cpu::isa_choices()), warn,
      "instructions that the CPU's ops may use; auto: the best that the processor has. Each set rounds differently");
  group = "Modes";
  add("--evaluate", "", o.evaluate, Limits{}, free,
      "instead of training, evaluate the model in directory --model on --val-data (all of them, or as much as "
      "--val-steps says) and on --eval-choices: print loss, perplexity, bits per byte and accuracies; in any layout; "
      "writes nothing; --seq-len defaults to that of its training");
  add("--generate", "", o.generate, Limits{}, free,
      "instead of training, continue --prompt with the model in directory --model, on one rank; the model sees at most "
      "--seq-len tokens, by default as many as in its training");
  add("--interactive", "", o.interactive, Limits{}, free,
      "with --generate, take each line of stdin as a prompt, and continue it before the next is read; the end of the "
      "file (Ctrl-D) ends it");
  add("--plan", "", o.plan, Limits{}, free,
      "instead of training, print what the run would need: memory by name and by stage, work by op; needs neither data "
      "nor, for --device cuda, a GPU");
  add("--plan-auto", "", o.plan_auto, Limits{}, free,
      "instead of training, search the layouts of --model on --ranks of --machine for the fastest ones that fit: --tp, "
      "--cp, --ep, --pp, schedule, ZeRO stage, micro-batches, recomputation; the options of the optimizer and of its "
      "state are kept; with --tokens or --max-steps, also how long the run takes");
  add("--ranks", "", o.plan_ranks, between(1, largest_size), free,
      "with --plan and --plan-auto, the ranks of all processes, in the place of --local-ranks and --world-size");
  add("--plan-examples", "", o.plan_examples, Limits{}, free,
      "instead of training, plan the runs of Megatron-LM's, Llama's and other papers, and print the times beside the "
      "published ones");
  add("--machine", "", o.machine, Limits{}, free,
      "with --plan and --plan-auto, the machine to plan for, which need not be here: h100x8, h200x8, b200x8, gb200x72, "
      "a100x8, a100-40x8, l40sx8, rtx4090x8, rtx4080x8 or v100x8, with any number of GPUs per server, or a FILE.json "
      "(llmc/run/README.md); with --plan also servers without GPUs: cpu, cpu-avx2 or cpu-amx, with any number of "
      "cores, as in cpux16; local: the processors of this machine, measured for some seconds; default: the GPUs of "
      "this machine, by their datasheet");
  add("--price", "", o.price, between(0, 1e6), free,
      "with --plan and --plan-auto, the price of a GPU for an hour, for that of the run");
  add("--coord-check", "", o.coord_check, Limits{}, free,
      "instead of training, train --model with each of these widths, such as 128,256,512, for ten steps, from three "
      "seeds, on a made-up text, and print the sizes of activations and of their changes: PASS, if neither depends on "
      "the width, so that --parametrization and the optimizer's options suit all of them; of the widths from 128 on, "
      "the largest must be at least four times the smallest; heads keep their size, or with --n-head their number");
  add("--coord-depths", "", o.coord_depths, Limits{}, free,
      "with --coord-check, also train the first width with each of these numbers of layers, such as 2,4,8");
  add("--print-schedule", "", o.print_schedule, Limits{}, free,
      "instead of training, draw what each stage of a pipeline of --pp stages does when, with --schedule, --pp-chunks "
      "and --token-slices, how long it idles and how much it keeps; needs no data");
  add("--print-stages", "", o.print_stages, Limits{}, free,
      "instead of training, print the stages of the run: tokens, steps, mix, batch, sequence length and learning rate; "
      "with --json for scripts/plot_stages.py");
  add("--print-samples", "", o.print_samples, Limits{}, free,
      "instead of training, print the samples of steps N-M, a line of JSON for each step: source, sample in its files, "
      "first token in that sample, number of targets; the samples of a run do not depend on its layout. If --out-dir "
      "holds this run, they are those of its newest checkpoint's recipe, seeds and rollbacks");
  add("--micro-batches", "", o.micro_batches, between(1, 1 << 20), free,
      "with --print-schedule, the micro-batches of a step; default: twice --pp");
  add("--json", "", o.json, Limits{}, free,
      "print JSON instead of text: with --plan, --plan-auto, --print-schedule (scripts/plot_schedule.py draws it), "
      "--print-stages, --coord-check and --evaluate");
  add("--tokenize", "", o.tokenize, Limits{}, free,
      "instead of training, turn files into token shards with --tokenizer, on --threads: text, a document each, or "
      "JSON lines (.jsonl, .ndjson, .json), also compressed with gzip or zstd; files, or quoted patterns, with commas "
      "between them. Every document begins with the end of text. An interrupted command, repeated, goes on");
  add("--average", "", o.average, Limits{}, free,
      "instead of training, average the weights of several models of one shape, such as the last checkpoints of a run "
      "or their folders ema: directories, with commas between them; the mean is a new model in the directory --out");
  add("--out", "", o.tokenize_out, Limits{}, free,
      "with --tokenize, what the names of the shards begin with: PREFIX_train_000000.bin; --restart replaces those "
      "that are there; with --average, the directory to make");
  add("--tokenize-field", "", o.tokenize_field, Limits{}, free,
      "with --tokenize, the field of JSON lines that is text");
  add("--tokenize-split", "", o.tokenize_split, any_of<TokenizeSplit>(), free,
      "with --tokenize, the split that the shards are named after");
  add("--shard-size", "", o.shard_size, at_least(1), free, "with --tokenize, the tokens of a shard");
  add("--selftest", "", o.selftest, Limits{}, free,
      "instead of training, compare layouts of up to --local-ranks ranks with one rank, on tiny models");
  add("--selftest-layouts", "", o.selftest_layouts, any_of<SelftestLayouts>(), free,
      "pairs: a subset in which every pair of choices occurs (of axes, stages, schedules, families, in either dtype); "
      "all: every layout");
  add("--selftest-minutes", "", o.selftest_minutes, between(0, 1e6), free,
      "then go on for so many minutes with models, options and layouts drawn at random, in any possible combination; "
      "each sweep has other draws; a draw that fails is printed with the command that repeats it");
  add("--selftest-draws", "", o.selftest_draws, Limits{}, free,
      "compare only draw N, or draws N-M, which depend on these numbers and on that of the ranks; with "
      "--selftest-minutes, the draws from N on");
  add("--verify-data", "", o.verify_data, Limits{}, free,
      "instead of training, read all of --train-data and --val-data, check every token against the vocabulary, and "
      "count them");
  add("--profile", "", o.profile, Limits{}, free,
      "time every op and print a table after training; slower, because ops then wait for each other");
  add("--trace", "", o.trace, Limits{}, free,
      "write the timeline of one step to this file, for https://ui.perfetto.dev or chrome://tracing: when each rank "
      "computes, communicates and waits; with --plan, the step on paper of each stage, on --machine");
  add("--trace-step", "", o.trace_step, at_least(1), free,
      "the step of --trace, counted from the start or resume of the run; default: 3, or the last if there are fewer");
  add("--peak-tflops", "", o.peak_tflops, between(1e-6, 1e9), free,
      "peak that MFU refers to, in TFLOP/s, of a GPU, or of a process on CPUs; default: the GPU's datasheet (dense), "
      "or the CPU's measured matmul peak");
  add("--log-gpu-every", "", o.log_gpu_every, at_least(0), free,
      "steps between lines with the GPU's utilisation, memory, clock, power, temperature and throttling; 0: never");
  return rows;
}

// Checks each value on its own.
inline void check_limits(Options& o) {
  for (const OptionRow& row : option_rows(o)) row.field.check(row.name, row.limits);
}

}  // namespace llmc
