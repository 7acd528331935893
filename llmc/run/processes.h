// processes.h: a job of several processes: which one this is, what they must agree on, what they do together, and what
// a spare reads while it waits.
#pragma once
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "comm/connected_processes.h"
#include "core/clock.h"
#include "core/environment.h"
#include "core/json.h"
#include "core/log.h"
#include "device/gpu.h"
#include "device/host.h"
#include "net/meeting/rendezvous.h"
#include "run/checkpoints/checkpoint.h"
#include "run/options/parse.h"
#include "run/options/print.h"
#include "run/reports/report.h"
#include "run/setup.h"

namespace llmc {

namespace detail {

inline Launched launch_of(const Options& o) {
  return find_launch({o.rank, o.world_size, o.rendezvous}, environment_variable, mpi_library());
}

// Is stdout a terminal that a person reads and that understands escape codes?
inline bool person_reads(const Options& o) {
  return isatty(STDOUT_FILENO) == 1 && environment_variable("TERM").value_or("dumb") != "dumb" &&
         !launcher_has_output({o.rank, o.world_size, o.rendezvous}, environment_variable);
}

// The options that must be the same for all processes: all but those that say where a process is. --cpu-isa auto takes
// other instructions on another processor, which round differently; a node's own disk may have a name of its own.
inline NamedValues options_to_agree_on(const Options& o) {
  NamedValues all;
  for (const OptionText& t : option_texts(o))
    if (t.name != "--rank" && t.name != "--spare" && t.name != "--rendezvous" && t.name != "--threads")
      all.emplace_back(t.name, t.name == "--cpu-isa"                               ? cpu::recorded_isa()
                               : t.name == "--checkpoint-local" && !t.text.empty() ? "a directory"
                                                                                   : t.text);
  return all;
}

// Rejects a spare that could not take the place of another process.
inline void check_spare(const Options& o) {
  CHECK(o.world_size && *o.world_size > 1 && !o.rendezvous.empty(),
        "--spare needs --world-size and --rendezvous: those of the job's processes, which are two or more");
  const Launched launch = find_launch({}, environment_variable, mpi_library());
  CHECK(launch.processes == 1,
        "--spare: {} has given this process a number, and would end all processes with the one that fails: start "
        "processes and spares by --rank, --world-size and --rendezvous, or keep spare hosts (scripts/supervise.sh "
        "--spares)",
        launch.how);
}

}  // namespace detail

// The log of this process, silent unless it is the one that prints.
inline Log make_log(const Options& o, const Processes& processes = {}) {
  if (processes.process() != 0) return Log::silent();
  return Log(detail::person_reads(o) ? ProgressLine::shown : ProgressLine::none);
}

// The hosts of a plan, whose processes are nowhere yet: each is like this one, with a rank for each GPU, as far as
// processes are whole, or more where one has more. On processors, this host has all ranks.
inline void plan_hosts(Place& place, int64_t gpus) {
  const int64_t ranks = place.processes * place.local_ranks;
  place.ranks_on_host =
      gpus == 0 ? ranks : std::min(ranks, place.local_ranks * std::max<int64_t>(1, gpus / place.local_ranks));
  place.hosts = ceil_div(ranks, place.ranks_on_host);
}

// What one process does alone, the others leave to it: said where a person may have become another one by accident, as
// in a container whose variables say so.
inline void say_idle(const Place& place) {
  if (::isatty(STDERR_FILENO) == 1)
    print_error(
        formatted("notice: this is process {} of {} ({}), and process 0 alone does this: to do it here, start "
                  "one process, or unset the variables that say so",
                  place.process, place.processes, place.started_by));
}

// Sets the number of ranks, and which of them are this process's, as far as launcher and options say.
inline void take_place(Options& o) {
  Place& place = o.place;
  if ((o.plan || o.plan_auto) && !o.rank) {  // a plan needs no processes
    place.processes = o.plan_ranks ? *o.plan_ranks : o.world_size.value_or(1);
  } else if (o.spare && !o.rank) {
    detail::check_spare(o);
    place.process = 1;  // for now: any but 0
    place.processes = *o.world_size;
  } else {
    const Launched launch = detail::launch_of(o);
    place.process = launch.process;
    place.processes = launch.processes;
    place.started_by = launch.how;
  }
  place.local_ranks = o.local_ranks > 0 ? o.local_ranks : (place.processes > 1 || o.plan_ranks) ? 1 : default_ranks(o);
  o.ranks = place.processes * place.local_ranks;
  CHECK(o.plan_ranks || o.ranks <= largest_size, "{} processes with --local-ranks {}: {} ranks, expected at most {}",
        place.processes, place.local_ranks, o.ranks, static_cast<int64_t>(largest_size));
  place.ranks_on_host = place.local_ranks;
  if (o.plan || o.plan_auto) plan_hosts(place, gpus_here(o));
}

// While a process waits as a spare, it reads what it would have to read first: so the files are known to be intact, and
// their pages are in the memory of this machine.
class SpareFiles {
 public:
  using Say = std::function<void(const std::string&)>;

  SpareFiles(std::string out_dir, Say say)
      : out_dir_(std::move(out_dir)), say_(std::move(say)), thread_([this] { run(); }) {}
  // What is being read is read to its end: a resume would need it next.
  ~SpareFiles() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  SpareFiles(const SpareFiles&) = delete;
  SpareFiles& operator=(const SpareFiles&) = delete;

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (!ending_) {
      lock.unlock();
      look();
      lock.lock();
      changed_.wait_for(lock, std::chrono::seconds(1), [this] { return ending_; });
    }
  }
  // Reads the newest checkpoint, if it is another one than the last time.
  void look() try {
    const std::vector<int64_t> steps = checkpoint_steps(out_dir_);
    const std::string path = steps.empty() ? "" : checkpoint_path(out_dir_, steps.back());
    if (path == last_) return;
    last_ = path;
    const auto begin = Clock::now();
    const std::optional<std::string> fault = checkpoint_fault(path);
    const double seconds = seconds_since(begin);
    if (!fault) say_(formatted("{} is read, and intact ({:.1f} s)", path, seconds));
    else if (path_exists(path)) say_(formatted("WARNING: {} is damaged: {}", path, *fault));  // not pruned meanwhile
  } catch (const std::exception& error) {
    say_(formatted("WARNING: cannot look at {}: {}", out_dir_, error.what()));
  }

  std::string out_dir_;
  Say say_;
  std::string last_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ending_ = false;
  std::thread thread_;  // last: it uses all of them
};

// Meets the other processes of the job, and completes this process's place. None: a spare that was not needed.
inline std::unique_ptr<Processes> meet(Options& o) {
  Place& place = o.place;
  const bool alone = place.processes == 1 || !needs_ranks(o), trains = needs_ranks(o) && !o.selftest && !o.evaluate;
  if (!alone || !trains) unblock_stop_signals();  // else a signal that is pending waits until the run can be saved
  if (alone)
    return std::make_unique<Processes>(needs_ranks(o) ? static_cast<int>(place.local_ranks) : 1,
                                       Timeouts{o.init_timeout, o.comm_timeout});
  unread_errors_left_out = true;
  Rendezvous at;
  at.token = read_token(environment_variable);
  at.init_timeout = o.init_timeout;
  at.address = environment_variable("TRAIN_GPT_ADDRESS").value_or("");
  at.spare_wait = std::min(o.spare_wait, o.init_timeout / 2);
  const auto say_as = [&](const std::string& who) {
    at.say = [me = who + " on " + host_name() + ": "](const std::string& text) { print_error(me + text); };
  };
  Greeting greeting{.processes = static_cast<int>(place.processes),
                    .local_ranks = static_cast<int>(place.local_ranks),
                    .build = build_text(),
                    .agree = detail::options_to_agree_on(o)};
  std::optional<SpareFiles> files;  // until it has met the others: they do not wait for what it is reading
  if (o.spare && !o.rank) {
    say_as("spare");
    at.where = o.rendezvous;
    files.emplace(o.out_dir, at.say);
    const std::optional<int> given = wait_as_spare(greeting, at, o.comm_timeout + 10);
    at.say(given ? formatted("takes the place of rank {}", *given * place.local_ranks)
                 : "the job has ended: not needed");
    if (!given) return nullptr;
    o.rank = *given;
    at.was_spare = true;
    take_place(o);
  }
  const Launched launch = detail::launch_of(o);
  say_as(formatted("rank {}", place.first_rank()));
  at.where = launch.rendezvous;
  greeting.process = launch.process;
  auto processes = std::make_unique<Processes>(launch, std::move(greeting), std::move(at), o.comm != CommChoice::tcp,
                                               o.comm_timeout);
  const ControlPlane& control = *processes->control();
  place.by_mpi = launch.by == Launched::By::mpi;
  place.ranks_on_host = control.local_processes() * place.local_ranks;
  place.rank_on_host = control.local_process() * place.local_ranks;
  std::set<std::string> machines;
  for (const Peer& peer : control.peers()) {
    machines.insert(peer.machine);
    place.host_of_process.push_back(peer.host);
  }
  place.hosts = static_cast<int64_t>(machines.size());
  // Launchers bind processes to processors, or give each its own GPUs.
  const std::string machine = control.peers()[static_cast<size_t>(place.process)].machine;
  const auto sharing = [&](const std::string& topic, const std::string& mine) {
    const std::vector<std::string> all = processes->all_gather(topic, mine);
    int64_t count = 0;
    for (size_t p = 0; p < all.size(); ++p) count += all[p] == mine && control.peers()[p].machine == machine;
    return count;
  };
  place.sharers = sharing("processors", processor_set());
  const int64_t gpu_sharers = sharing("GPUs", gpu_set());  // all processes ask, whether they see any or not
  place.own_gpus = visible_gpus().count > 0 && gpu_sharers == 1;
  return processes;
}

// The command line of this process was rejected. Processes that wait for it are told why and end too, unless their
// launcher ends them, as mpirun does; in that case this throws the error that all of them print.
inline void tell_refusal(int argc, const char* const* argv, const std::string& error) {
  constexpr double patience = 10;  // seconds for the others to arrive
  std::map<std::string, std::string> given;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const size_t equals = word.find('=');
    given[word.substr(0, equals)] = equals != word.npos ? word.substr(equals + 1) : i + 1 < argc ? argv[i + 1] : "";
  }
  try {
    LaunchOptions options{{}, {}, given["--rendezvous"]};
    for (const auto& [name, number] :
         {std::pair{"--rank", &options.rank}, std::pair{"--world-size", &options.world_size}})
      if (given.contains(name)) detail::parse_value(name, given[name], *number);
    const Launched launch = find_launch(options, environment_variable, mpi_library());
    if (launch.processes == 1 || launch.by == Launched::By::mpi) return;
    Rendezvous at;
    at.where = launch.rendezvous;
    at.token = read_token(environment_variable);
    at.init_timeout = patience;
    at.say = print_error;
    unread_errors_left_out = true;
    const ControlPlane told(
        {.process = launch.process, .processes = launch.processes, .build = build_text(), .agree = {{refusal, error}}},
        std::move(at));
  } catch (const SharedError&) {
    throw;
  } catch (const Error&) {  // nobody is there
  }
}

// The options and this process's place.
inline Command read_command_line(int argc, const char* const* argv) try {
  return parse_command_line({argv, argv + argc}, take_place);
} catch (const Error& error) {
  tell_refusal(argc, argv, error.what());
  throw;
}

// Waits for what process 0 has written: a network file system may take a moment to show it to the others.
inline void wait_for_path(const std::string& path) {
  const auto limit = Clock::now() + std::chrono::seconds(10);
  while (!path_exists(path) && Clock::now() < limit) std::this_thread::sleep_for(std::chrono::milliseconds(100));
}

// Does the same on all processes; if it fails on one, it fails on all, with the error and the process that had it.
template <class F>
void together(const Processes& processes, const char* what, F&& f) {
  std::string fault;
  try {
    f();
  } catch (const Error& error) {
    if (processes.alone()) throw;
    fault = error.what();
  }
  const std::vector<std::string> all = processes.all_gather(what, fault);
  const bool same = std::ranges::count(all, all[0]) == std::ssize(all);
  const auto first = std::ranges::find_if(all, [](const std::string& text) { return !text.empty(); });
  if (first == all.end()) return;
  const int rank = static_cast<int>(first - all.begin()) * processes.control()->local_ranks();
  throw SharedError((same ? "" : processes.control()->name_of_rank(rank) + ": ") + *first);
}

// Gathers the texts of all processes, which may be longer than a message between them.
inline std::vector<std::string> gather_large(const std::string& topic, const std::string& mine,
                                             const Processes& processes) {
  constexpr size_t piece = 1 << 19;
  size_t longest = 0;
  for (const std::string& size : processes.all_gather(topic + " to come", std::to_string(mine.size())))
    longest = std::max<size_t>(longest, std::stoull(size));
  std::vector<std::string> all;
  for (size_t begin = 0; begin < longest || all.empty(); begin += piece) {
    const auto parts = processes.all_gather(topic, begin < mine.size() ? mine.substr(begin, piece) : "");
    all.resize(parts.size());
    for (size_t p = 0; p < parts.size(); ++p) all[p] += parts[p];
  }
  return all;
}

// Whether this holds on any process. processes: null for this one alone.
inline bool any_process(const Processes* processes, const std::string& topic, bool here) {
  if (processes == nullptr) return here;
  const std::vector<std::string> all = processes->all_gather(topic, here ? "yes" : "");
  return std::ranges::find(all, "yes") != all.end();
}

// Throws on all processes if what each has found by itself is not the same everywhere.
inline void require_same(const Processes& processes, const char* what, const NamedValues& mine) {
  if (processes.alone()) return;
  Said said;
  for (const std::string& text : processes.all_gather(what, nlohmann::json(mine).dump())) {
    const int process = static_cast<int>(said.size());
    said.emplace_back(process, parse_json(text, formatted("process {}", process)).get<NamedValues>());
  }
  const std::string difference = disagreement(said, processes.control()->local_ranks());
  if (!difference.empty()) throw SharedError(difference);
}

// What to print when a process ends with an error of its own, or because another one ended; and its exit status.
inline Fault end_alone(Processes* processes, const std::exception& error) {
  const bool follows =
      dynamic_cast<const PeerError*>(&error) != nullptr || dynamic_cast<const ConnectionError*>(&error) != nullptr;
  const auto* const ours = dynamic_cast<const Error*>(&error);
  const Fault fault{failure_text(error), ours != nullptr ? ours->status() : ExitStatus::refused};
  return processes == nullptr ? fault : processes->fail(fault, follows);
}

// Called when all processes end for the same reason: none ends before process 0 has said why, because launchers end the
// others once one has failed. Returns the exit status.
inline int end_together(const Processes* processes, ExitStatus status) {
  try {
    if (processes) processes->all_gather("end", "");
    if (processes && processes->control() != nullptr && status == ExitStatus::diverged)
      processes->control()->keep_spares();  // supervise.sh starts it again
  } catch (const Error&) {                  // one is gone already
  }
  return static_cast<int>(status);
}

}  // namespace llmc
