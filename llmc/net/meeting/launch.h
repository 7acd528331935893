// launch.h: how many processes a run has, which of them this one is, and where they meet: from the options and from
// what launchers leave in the environment. A pure function; nothing is opened here.
//
//   launcher                        this process           how many of them         they meet by
//   mpirun (Open MPI)               OMPI_COMM_WORLD_RANK   OMPI_COMM_WORLD_SIZE     MPI; other builds: --rendezvous
//   mpiexec (MPICH, Intel MPI)      PMI_RANK               PMI_SIZE                 the same
//   others with PMIx                PMIX_RANK              --world-size             the same
//   srun                            SLURM_PROCID           SLURM_STEP_NUM_TASKS     MPI where it works; else TCP, at
//                                                                                   the first node of the step
//   torchrun and its like           RANK                   WORLD_SIZE               MASTER_ADDR, MASTER_PORT
//   none                            --rank                 --world-size             --rendezvous
//
// Launchers nest, and the variables of the outer one are inherited: the inner one counts. mpirun in a Slurm job starts
// its daemons with srun, and SLURM_PROCID is the daemon's; srun may start a torchrun on each node. SLURM_NTASKS alone
// means nothing: the script of sbatch and the shell of salloc are one process each. They have no SLURM_STEP_ID, or a
// step of one task.
#pragma once

#include "core/check.h"
#include "core/environment.h"
#include "core/words.h"

namespace llmc {

// The MPI library of this build. mpich: MPICH or a library derived from it, such as Intel MPI and MVAPICH.
enum class MpiLibrary : uint8_t { none, open_mpi, mpich };

struct Launched {
  // mpi: MPI_Init finds the other processes. options: also under an mpirun of another MPI than this build's.
  enum class By : uint8_t { alone, mpi, slurm, torchrun, options } by = By::alone;
  int process = 0, processes = 1;
  std::string rendezvous;           // --rendezvous, or "HOST:PORT"; empty: alone, or MPI tells
  std::string how = "one process";  // "mpirun (Open MPI)", "srun (Slurm job 17)"
};

// --rank, --world-size, --rendezvous. They count processes, as RANK and WORLD_SIZE do.
struct LaunchOptions {
  std::optional<int64_t> rank, world_size;
  std::string rendezvous = {};
};

// The first host of a Slurm node list: "node[01-03,7],gpu5" -> "node01", "r[1-2]n[0-3]" -> "r1n0".
inline std::string first_slurm_host(const std::string& list) {
  enum class At : uint8_t { name, first_number, other_numbers } at = At::name;
  std::string host;
  bool valid = true;
  for (const char c : list) {
    const bool digit = c >= '0' && c <= '9';
    if (at == At::name) {
      if (c == ',') break;
      if (c == '[') at = At::first_number;
      else host += c;
      valid = valid && c != ']' && c != ' ';
    } else if (c == ']') {
      valid = valid && !host.empty() && host.back() >= '0' && host.back() <= '9';
      at = At::name;
    } else if (c == '-' || c == ',') {
      at = At::other_numbers;
    } else {
      valid = valid && digit;
      if (at == At::first_number) host += c;
    }
  }
  CHECK(valid && at == At::name && !host.empty(),
        "'{}' is no list of Slurm nodes such as node[01-03,7],gpu5: give --rendezvous HOST:PORT", shown(list));
  return host;
}

namespace detail {

struct Number {
  std::string name;  // of a variable or an option
  int64_t value = 0;
  std::string shown() const { return formatted(name.starts_with("--") ? "{} {}" : "{}={}", name, value); }
};

// The claim of a launcher, or of the user, about this process; without a rank, none.
struct Claim {
  Launched::By by = Launched::By::alone;
  std::string how;
  std::optional<Number> rank = {}, size = {};
  MpiLibrary mpi = MpiLibrary::none;  // By::mpi: whose MPI_Init finds the others
};

class FindLaunch {
 public:
  FindLaunch(const LaunchOptions& options, const Environment& environment, MpiLibrary built)
      : options_(options), environment_(environment), built_(built) {}

  Launched find() const {
    Claim claim = innermost_launcher();
    const Claim by_hand = torchrun(), options = from_options();
    if (!claim.rank || (claim.size && claim.size->value == 1)) claim = by_hand;  // one process says nothing of others
    agree(claim, by_hand, "unset RANK and WORLD_SIZE");
    agree(claim, options, "leave --rank and --world-size out");
    if (!claim.rank) claim = options;
    if (!claim.size) claim.size = options.size;
    return launch_of(claim);
  }

  // Slurm gives `srun --pty`, and the shell of salloc, their caller's terminal. A variable without its partner says
  // nothing here: find() reports the mistake where it counts.
  bool has_output() const try {
    for (const Claim& claim : {open_mpi(), mpich(), pmix(), torchrun(), from_options()})
      if (claim.rank) return true;
    return slurm().rank && !text("SLURM_PTY_PORT");
  } catch (const Error&) {
    return false;
  }

 private:
  // ---- What launchers say ----

  Claim innermost_launcher() const {
    if (text("TORCHELASTIC_RUN_ID")) return torchrun();
    for (const Claim& claim : {open_mpi(), mpich(), pmix()})
      if (claim.rank) return claim;
    return slurm();
  }

  // By these two variables.
  Claim claim_of(Launched::By by, std::string how, const char* rank, const char* size, MpiLibrary mpi) const {
    return {by, std::move(how), number(rank, size), number(size, rank), mpi};
  }

  Claim open_mpi() const {
    return claim_of(Launched::By::mpi, "mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                    MpiLibrary::open_mpi);
  }

  Claim mpich() const {
    // srun --mpi=pmi2 sets PMI_RANK too, and with it PMI_JOBID, which mpiexec does not set but inherits.
    if (text("PMI_JOBID") && !text("MPI_LOCALRANKID")) return {};
    return claim_of(Launched::By::mpi, "mpiexec (MPICH)", "PMI_RANK", "PMI_SIZE", MpiLibrary::mpich);
  }

  // PMIx tells the number of processes only to programs that call it, as Open MPI does.
  Claim pmix() const {
    if (text("PMIX_NAMESPACE").value_or("").starts_with("slurm.pmix.")) return {};  // srun --mpi=pmix
    return {.by = Launched::By::mpi,
            .how = "a launcher with PMIx",
            .rank = number("PMIX_RANK"),
            .mpi = MpiLibrary::open_mpi};
  }

  // An sbatch called from within a step inherits that step's variables and looks like its first task. It waits for the
  // others until --init-timeout, and says so.
  Claim slurm() const {
    if (!text("SLURM_STEP_ID")) return {};
    Claim claim =
        claim_of(Launched::By::slurm, formatted("srun (Slurm job {})", text("SLURM_JOB_ID").value_or("unknown")),
                 "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", built_);
    // Without Slurm's help Open MPI ends the program in MPI_Init, and MPICH finds nobody. The names of job and step
    // tell whether the help is for this step: one within another inherits the variables of the outer one.
    const std::string step = text("SLURM_JOB_ID").value_or("") + "." + *text("SLURM_STEP_ID");
    const bool helped = built_ == MpiLibrary::open_mpi ? text("PMIX_NAMESPACE") == "slurm.pmix." + step
                                                       : built_ == MpiLibrary::mpich && text("PMI_JOBID") == step;
    if (helped) claim.by = Launched::By::mpi;
    else if (built_ != MpiLibrary::none)
      claim.how += formatted("; --mpi={} would let it use MPI", built_ == MpiLibrary::open_mpi ? "pmix" : "pmi2");
    return claim;
  }

  // Set by torchrun, by programs that imitate it, and by hand.
  Claim torchrun() const {
    return claim_of(Launched::By::torchrun, "torchrun's variables", "RANK", "WORLD_SIZE", MpiLibrary::none);
  }

  Claim from_options() const {
    Claim claim{.by = Launched::By::options, .how = "--rank"};
    if (options_.rank) claim.rank = Number{"--rank", *options_.rank};
    if (options_.world_size) claim.size = Number{"--world-size", *options_.world_size};
    return claim;
  }

  // ---- Is it consistent? ----

  static void agree(const Claim& claim, const Claim& other, const char* remedy) {
    if (!claim.rank) return;
    for (const auto member : {&Claim::rank, &Claim::size}) {
      const std::optional<Number>&a = claim.*member, &b = other.*member;
      CHECK(!a || !b || a->value == b->value, "{} contradicts {} of {}: {}", b->shown(), a->shown(), claim.how, remedy);
    }
  }

  static void count_from_0(const std::optional<Number>& rank, const std::optional<Number>& size) {
    constexpr int64_t most = 1 << 20;
    CHECK(!size || (size->value > 0 && size->value <= most), "{}: expected 1 to {}", size->shown(), most);
    CHECK(!rank || !size || (rank->value >= 0 && rank->value < size->value), "{} with {}: expected 0 to {}",
          rank->shown(), size->shown(), size->value - 1);
  }

  // ---- From a claim to a launch ----

  Launched launch_of(const Claim& claim) const {
    const std::string all = "--rank, --world-size and --rendezvous go together, unless a launcher gives the first two";
    CHECK(claim.size || !claim.rank || claim.by == Launched::By::options,
          "{} of {} is one of several processes, but of how many? Add --world-size N, or unset PMIX_RANK",
          claim.rank->shown(), claim.how);
    CHECK(claim.size || (!claim.rank && options_.rendezvous.empty()), "{}", all);
    count_from_0(claim.rank, claim.size);
    if (!claim.size || claim.size->value == 1) return alone();
    CHECK(claim.rank, "{}", all);
    Launched launch{.by = claim.by,
                    .process = static_cast<int>(claim.rank->value),
                    .processes = static_cast<int>(claim.size->value),
                    .rendezvous = options_.rendezvous,
                    .how = claim.how};
    if (launch.by == Launched::By::mpi && claim.mpi != built_) launch.by = Launched::By::options;
    if (launch.rendezvous.empty() && launch.by != Launched::By::mpi) launch.rendezvous = rendezvous(claim, launch);
    return launch;
  }

  Launched alone() const {
    Launched launch;
    const std::optional<Number> tasks = number("SLURM_NTASKS");
    if (tasks && tasks->value > 1)
      launch.how += formatted(", although the Slurm job is for {} tasks: srun or mpirun starts them", tasks->value);
    return launch;
  }

  std::string rendezvous(const Claim& claim, const Launched& launch) const {
    if (launch.by == Launched::By::slurm) return slurm_rendezvous(launch);
    if (launch.by == Launched::By::torchrun) return torchrun_rendezvous();
    CHECK(claim.by != Launched::By::mpi,
          "{} is of {}, and this build has {}: {}, or add --rendezvous HOST:PORT, where the processes meet by TCP",
          claim.rank->shown(), claim.how, name_of(built_),
          built_ == MpiLibrary::none ? "build it with MPI" : "use the mpirun of that MPI");
    throw Error(formatted("{} and {} need --rendezvous HOST:PORT, the same for all processes", claim.rank->shown(),
                          claim.size->shown()));
  }

  // A port of its own for every step, below those that Linux gives to clients (from 32768).
  std::string slurm_rendezvous(const Launched& launch) const {
    const std::optional<Number> job = number("SLURM_JOB_ID"), step = number("SLURM_STEP_ID");
    const std::optional<std::string> nodes = text("SLURM_STEP_NODELIST");
    CHECK(job && nodes, "{} is not set: give --rendezvous HOST:PORT", job ? "SLURM_STEP_NODELIST" : "SLURM_JOB_ID");
    const std::string host = first_slurm_host(*nodes), here = text("SLURMD_NODENAME").value_or(host);
    CHECK(launch.process != 0 || here == host,
          "SLURM_PROCID=0 runs on {} and not on the first host of SLURM_STEP_NODELIST={}: give --rendezvous {}:PORT",
          here, *nodes, here);
    return formatted("{}:{}", host, 10000 + (job->value * 31 + step->value) % 20000);
  }

  std::string torchrun_rendezvous() const {
    const std::optional<std::string> host = text("MASTER_ADDR");
    const std::optional<Number> port = number("MASTER_PORT", "MASTER_ADDR");
    CHECK(host && port, "{} is not set, but RANK and WORLD_SIZE are: set it, or give --rendezvous HOST:PORT",
          host ? "MASTER_PORT" : "MASTER_ADDR");
    CHECK(port->value > 0 && port->value < 65535, "{}: expected a port, 1 to 65534", port->shown());
    // torchrun's own store may be listening at MASTER_PORT itself.
    const bool taken = text("TORCHELASTIC_USE_AGENT_STORE") == "True";
    return formatted(host->find(':') == std::string::npos ? "{}:{}" : "[{}]:{}", *host, port->value + (taken ? 1 : 0));
  }

  static std::string name_of(MpiLibrary mpi) {
    return mpi == MpiLibrary::none ? "no MPI" : mpi == MpiLibrary::open_mpi ? "Open MPI" : "MPICH";
  }

  // ---- Variables; an empty one counts as unset ----

  std::optional<std::string> text(const char* name) const {
    const std::optional<std::string> value = environment_(name);
    return value && value->empty() ? std::nullopt : value;
  }

  // partner: the variable that must be set if this one is.
  std::optional<Number> number(const char* name, const char* partner = nullptr) const {
    const std::optional<std::string> value = text(name);
    if (!value) return {};
    const std::optional<uint32_t> read = number_from<uint32_t>(*value);
    CHECK(read, "{}='{}': expected a whole number; correct it, or unset it", name, llmc::shown(*value));
    CHECK(partner == nullptr || text(partner), "{}={} is set and {} is not: set both, or unset {} to run one process",
          name, *read, partner, name);
    return Number{name, *read};
  }

  const LaunchOptions& options_;
  const Environment& environment_;
  MpiLibrary built_;
};

}  // namespace detail

// How this process was launched. Refuses what is contradictory, incomplete or cannot work, and names the variables.
inline Launched find_launch(const LaunchOptions& options, const Environment& environment, MpiLibrary built) {
  return detail::FindLaunch(options, environment, built).find();
}

// Does a launcher, or whatever gives each process its --rank, collect what this process prints? It may do so through a
// terminal that nobody reads, as mpirun does.
inline bool launcher_has_output(const LaunchOptions& options, const Environment& environment) {
  return detail::FindLaunch(options, environment, MpiLibrary::none).has_output();
}

}  // namespace llmc
