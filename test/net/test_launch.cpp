// Finding this process's place from what launchers set: seen with Open MPI 4.1, MPICH 4.0, Slurm 22.05 and torchrun.
#include <map>

#include "catch2.h"
#include "helpers.h"
#include "net/meeting/launch.h"

using namespace llmc;

namespace {

using Variables = std::map<std::string, std::string>;
using By = Launched::By;

Variables operator+(Variables a, const Variables& b) {
  for (const auto& [name, value] : b) a[name] = value;
  return a;
}

Launched find(const Variables& variables, MpiLibrary built = MpiLibrary::none, const LaunchOptions& options = {}) {
  return find_launch(
      options,
      [&](const std::string& name) {
        const auto found = variables.find(name);
        return found == variables.end() ? std::nullopt : std::optional(found->second);
      },
      built);
}

bool launcher_has_output(const Variables& variables, const LaunchOptions& options = {}) {
  return llmc::launcher_has_output(options, [&](const std::string& name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

// "by process/processes rendezvous"
std::string shown(const Launched& l) {
  constexpr std::array<const char*, 5> by = {"alone", "mpi", "slurm", "torchrun", "options"};
  return formatted("{} {}/{} {}", by[static_cast<size_t>(l.by)], l.process, l.processes, l.rendezvous);
}

const Variables open_mpi = {{"OMPI_COMM_WORLD_RANK", "2"},       {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"PMIX_NAMESPACE", "1728380929"},    {"PMIX_RANK", "2"}};
const Variables mpich = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
// A batch script of two nodes with two tasks each.
const Variables batch = {
    {"SLURM_JOB_ID", "17"}, {"SLURM_JOB_NODELIST", "n[1-2]"}, {"SLURM_NTASKS", "4"}, {"SLURMD_NODENAME", "n1"},
    {"SLURM_PROCID", "0"},  {"SLURM_LOCALID", "0"},           {"SLURM_NODEID", "0"}, {"SLURM_TASKS_PER_NODE", "2(x2)"}};
// Its `srun ./train_gpt`, the third task.
const Variables step = batch + Variables{{"SLURM_STEP_ID", "1"},
                                         {"SLURM_STEP_NUM_TASKS", "4"},
                                         {"SLURM_STEP_NODELIST", "n[1-2]"},
                                         {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                                         {"SLURMD_NODENAME", "n2"},
                                         {"SLURM_PROCID", "2"},
                                         {"SLURM_NODEID", "1"}};
const Variables step_pmix = {{"PMIX_NAMESPACE", "slurm.pmix.17.1"}, {"PMIX_RANK", "2"}};
const Variables step_pmi2 = {{"PMI_JOBID", "17.1"}, {"PMI_RANK", "2"}, {"PMI_SIZE", "4"}};
// As Open MPI's mpirun sees it there: its daemons are a step of one task for each node.
const Variables daemon = step + Variables{{"SLURM_STEP_NUM_TASKS", "2"},
                                          {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
                                          {"SLURM_NTASKS", "2"},
                                          {"SLURM_PROCID", "1"}};
const Variables by_hand = {{"RANK", "2"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "gpu1"}, {"MASTER_PORT", "29500"}};
const Variables torchrun = by_hand + Variables{{"LOCAL_RANK", "0"},
                                               {"LOCAL_WORLD_SIZE", "2"},
                                               {"TORCHELASTIC_RUN_ID", "none"},
                                               {"TORCHELASTIC_USE_AGENT_STORE", "True"}};

}  // namespace

TEST_CASE("without a launcher, with one process, or in a shell or script of a Slurm job, a process is alone", "[net]") {
  REQUIRE(shown(find({})) == "alone 0/1 ");
  REQUIRE(find({}).how == "one process");
  REQUIRE(shown(find({}, MpiLibrary::none, {.rank = 0, .world_size = 1})) == "alone 0/1 ");
  const Variables one = {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}};
  REQUIRE(shown(find(one, MpiLibrary::open_mpi)) == "alone 0/1 ");
  REQUIRE(shown(find(one)) == "alone 0/1 ");
  REQUIRE(shown(find({{"RANK", "0"}, {"WORLD_SIZE", "1"}})) == "alone 0/1 ");
  REQUIRE(shown(find({{"MASTER_ADDR", "gpu1"}, {"MASTER_PORT", "29500"}})) == "alone 0/1 ");
  REQUIRE(shown(find({{"RANK", ""}, {"WORLD_SIZE", ""}})) == "alone 0/1 ");
  REQUIRE(shown(find(batch)) == "alone 0/1 ");
  REQUIRE(find(batch).how == "one process, although the Slurm job is for 4 tasks: srun or mpirun starts them");
  // salloc's shell on the first node is a step of its own
  const Variables interactive = batch + Variables{{"SLURM_STEP_ID", "4294967290"}, {"SLURM_STEP_NUM_TASKS", "1"}};
  REQUIRE(shown(find(interactive)) == "alone 0/1 ");
  // started there by hand, as one of several
  REQUIRE(shown(find(interactive + by_hand)) == "torchrun 2/4 gpu1:29500");
  REQUIRE(shown(find(interactive, MpiLibrary::none, {1, 2, "gpu1:5000"})) == "options 1/2 gpu1:5000");
}

TEST_CASE("MPI's launchers are used with their own library, and need --rendezvous with another or none", "[net]") {
  REQUIRE(shown(find(open_mpi, MpiLibrary::open_mpi)) == "mpi 2/4 ");
  REQUIRE(find(open_mpi, MpiLibrary::open_mpi).how == "mpirun (Open MPI)");
  REQUIRE(shown(find(mpich, MpiLibrary::mpich)) == "mpi 1/2 ");
  REQUIRE(find(mpich, MpiLibrary::mpich).how == "mpiexec (MPICH)");
  REQUIRE(shown(find(open_mpi, MpiLibrary::open_mpi, {{}, {}, "gpu1:5000"})) == "mpi 2/4 gpu1:5000");
  for (const MpiLibrary other : {MpiLibrary::none, MpiLibrary::mpich})
    REQUIRE(shown(find(open_mpi, other, {{}, {}, "gpu1:5000"})) == "options 2/4 gpu1:5000");
  REQUIRE_ERROR(find(open_mpi), "OMPI_COMM_WORLD_RANK=2 is of mpirun (Open MPI), and this build has no MPI: build it");
  REQUIRE_ERROR(find(mpich, MpiLibrary::open_mpi),
                "PMI_RANK=1 is of mpiexec (MPICH), and this build has Open MPI: use");
  REQUIRE_ERROR(find(open_mpi, MpiLibrary::mpich), "add --rendezvous HOST:PORT");
}

TEST_CASE("a launcher with PMIx alone does not say how many processes there are: --world-size does", "[net]") {
  const Variables pmix = {{"PMIX_NAMESPACE", "prterun-a-1"}, {"PMIX_RANK", "3"}};
  REQUIRE_ERROR(find(pmix, MpiLibrary::open_mpi), "PMIX_RANK=3 of a launcher with PMIx");
  REQUIRE_ERROR(find(pmix, MpiLibrary::open_mpi), "--world-size N, or unset PMIX_RANK");
  REQUIRE(shown(find(pmix, MpiLibrary::open_mpi, {{}, 8, ""})) == "mpi 3/8 ");
  REQUIRE_ERROR(find(pmix, MpiLibrary::open_mpi, {2, 8, ""}), "--rank 2 contradicts PMIX_RANK=3");
  REQUIRE_ERROR(find(pmix, MpiLibrary::open_mpi, {{}, 3, ""}), "PMIX_RANK=3 with --world-size 3: expected 0 to 2");
}

TEST_CASE("the tasks of srun meet at the first node of their step, at a port of the step", "[net]") {
  REQUIRE(shown(find(step)) == "slurm 2/4 n1:10528");
  REQUIRE(find(step).how == "srun (Slurm job 17)");
  REQUIRE(find(step + Variables{{"SLURM_STEP_ID", "2"}}).rendezvous == "n1:10529");
  REQUIRE(find(step + Variables{{"SLURM_JOB_ID", "18"}}).rendezvous == "n1:10559");
  REQUIRE(find(step + Variables{{"SLURM_JOB_ID", "4294967295"}, {"SLURM_STEP_ID", "4294967289"}}).rendezvous ==
          "n1:23434");
  REQUIRE(shown(find(step, MpiLibrary::none, {{}, {}, "file:/shared/meet"})) == "slurm 2/4 file:/shared/meet");
  REQUIRE_ERROR(find(step + Variables{{"SLURM_PROCID", "0"}}), "SLURM_PROCID=0 runs on n2 and not on the first host");
  REQUIRE_ERROR(find(step + Variables{{"SLURM_STEP_NODELIST", ""}}), "SLURM_STEP_NODELIST is not set");
  REQUIRE_ERROR(find(step + Variables{{"SLURM_JOB_ID", ""}}), "SLURM_JOB_ID is not set");
}

TEST_CASE("under srun MPI is used only with the help of Slurm that its library takes, for this very step", "[net]") {
  REQUIRE(shown(find(step + step_pmix, MpiLibrary::open_mpi)) == "mpi 2/4 ");
  REQUIRE(shown(find(step + step_pmi2, MpiLibrary::mpich)) == "mpi 2/4 ");
  for (const auto& [variables, built] : std::vector<std::pair<Variables, MpiLibrary>>{
           {step, MpiLibrary::open_mpi},
           {step + step_pmi2, MpiLibrary::open_mpi},
           {step + step_pmix + Variables{{"PMIX_NAMESPACE", "slurm.pmix.17.0"}}, MpiLibrary::open_mpi},
           {step + step_pmix, MpiLibrary::none},
           {step, MpiLibrary::mpich},
           {step + step_pmix, MpiLibrary::mpich},
           // srun --mpi=none in the shell of srun -n 1 --mpi=pmi2
           {step + Variables{{"PMI_JOBID", "17.0"}, {"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}, MpiLibrary::mpich}})
    REQUIRE(shown(find(variables, built)) == "slurm 2/4 n1:10528");
  REQUIRE(find(step, MpiLibrary::open_mpi).how == "srun (Slurm job 17); --mpi=pmix would let it use MPI");
  REQUIRE(find(step, MpiLibrary::mpich).how == "srun (Slurm job 17); --mpi=pmi2 would let it use MPI");
}

TEST_CASE("of nested launchers the inner one counts", "[net]") {
  REQUIRE(shown(find(batch + open_mpi, MpiLibrary::open_mpi)) == "mpi 2/4 ");
  REQUIRE(shown(find(daemon + open_mpi, MpiLibrary::open_mpi)) == "mpi 2/4 ");
  REQUIRE(shown(find(daemon + mpich, MpiLibrary::mpich)) == "mpi 1/2 ");
  REQUIRE(shown(find(step + step_pmi2 + mpich, MpiLibrary::mpich)) == "mpi 1/2 ");
  // srun starts a torchrun on each node
  REQUIRE(shown(find(daemon + torchrun, MpiLibrary::open_mpi)) == "torchrun 2/4 gpu1:29501");
  // srun or mpirun, and a script that translates their variables
  REQUIRE(shown(find(step + by_hand)) == "slurm 2/4 n1:10528");
  REQUIRE(shown(find(open_mpi + by_hand, MpiLibrary::open_mpi)) == "mpi 2/4 ");
}

TEST_CASE("torchrun's variables say where to meet: beside the store of torchrun itself", "[net]") {
  REQUIRE(shown(find(torchrun)) == "torchrun 2/4 gpu1:29501");
  REQUIRE(shown(find(torchrun + Variables{{"TORCHELASTIC_USE_AGENT_STORE", "False"}})) == "torchrun 2/4 gpu1:29500");
  REQUIRE(shown(find(by_hand + Variables{{"MASTER_ADDR", "fd00::2"}})) == "torchrun 2/4 [fd00::2]:29500");
  REQUIRE(shown(find(by_hand, MpiLibrary::none, {{}, {}, "a:1"})) == "torchrun 2/4 a:1");
  REQUIRE_ERROR(find(by_hand + Variables{{"MASTER_ADDR", ""}, {"MASTER_PORT", ""}}), "MASTER_ADDR is not set");
  REQUIRE_ERROR(find(by_hand + Variables{{"MASTER_PORT", ""}}), "MASTER_PORT is not set");
  REQUIRE_ERROR(find(by_hand + Variables{{"MASTER_PORT", "70000"}}), "MASTER_PORT=70000: expected a port, 1 to 65534");
}

TEST_CASE("--rank, --world-size and --rendezvous go together", "[net]") {
  REQUIRE(shown(find({}, MpiLibrary::open_mpi, {1, 2, "a:1"})) == "options 1/2 a:1");
  for (const LaunchOptions& options :
       std::vector<LaunchOptions>{{1, {}, "a:1"}, {{}, 2, "a:1"}, {{}, {}, "a:1"}, {1, {}, ""}, {{}, 2, ""}})
    REQUIRE_ERROR(find({}, MpiLibrary::none, options), "--rank, --world-size and --rendezvous go together");
  REQUIRE_ERROR(find({}, MpiLibrary::none, {1, 2, ""}), "--rank 1 and --world-size 2 need --rendezvous HOST:PORT");
  REQUIRE_ERROR(find({}, MpiLibrary::none, {2, 2, "a:1"}), "--rank 2 with --world-size 2: expected 0 to 1");
  REQUIRE_ERROR(find({}, MpiLibrary::none, {1, 1, ""}), "--rank 1 with --world-size 1: expected 0 to 0");
}

TEST_CASE("what contradicts a launcher is refused with both values, what agrees with it is not", "[net]") {
  REQUIRE(shown(find(step, MpiLibrary::none, {2, 4, ""})) == "slurm 2/4 n1:10528");
  REQUIRE_ERROR(find(step, MpiLibrary::none, {1, 4, ""}),
                "--rank 1 contradicts SLURM_PROCID=2 of srun (Slurm job 17): leave --rank and --world-size out");
  REQUIRE_ERROR(find(by_hand, MpiLibrary::none, {2, 8, ""}), "--world-size 8 contradicts WORLD_SIZE=4 of torchrun's");
  REQUIRE_ERROR(find(open_mpi + by_hand + Variables{{"RANK", "0"}}, MpiLibrary::open_mpi),
                "RANK=0 contradicts OMPI_COMM_WORLD_RANK=2 of mpirun (Open MPI): unset RANK and WORLD_SIZE");
  REQUIRE_ERROR(find(step + by_hand + Variables{{"WORLD_SIZE", "8"}}),
                "WORLD_SIZE=8 contradicts SLURM_STEP_NUM_TASKS=4");
  REQUIRE_ERROR(find(step + Variables{{"RANK", "0"}, {"WORLD_SIZE", "1"}}), "RANK=0 contradicts SLURM_PROCID=2");
}

TEST_CASE("half a set of variables, and values that are no ranks, are refused by name", "[net]") {
  for (const auto& [there, missing] :
       std::vector<std::pair<std::string, std::string>>{{"RANK", "WORLD_SIZE"},
                                                        {"WORLD_SIZE", "RANK"},
                                                        {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                                        {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                                                        {"PMI_RANK", "PMI_SIZE"},
                                                        {"PMI_SIZE", "PMI_RANK"}})
    REQUIRE_ERROR(find({{there, "2"}}),
                  formatted("{}=2 is set and {} is not: set both, or unset {}", there, missing, there));
  REQUIRE_ERROR(find(step + Variables{{"SLURM_PROCID", ""}}), "SLURM_STEP_NUM_TASKS=4 is set and SLURM_PROCID is not");
  REQUIRE_ERROR(find(step + Variables{{"SLURM_STEP_NUM_TASKS", ""}}),
                "SLURM_PROCID=2 is set and SLURM_STEP_NUM_TASKS is");
  for (const std::string value : {"x", "-1", "2.0", "2 ", "0x2", "4294967296", "2\n"})
    REQUIRE_ERROR(find(by_hand + Variables{{"RANK", value}}),
                  "RANK='" + llmc::shown(value) + "': expected a whole number");
  REQUIRE_ERROR(find(by_hand + Variables{{"RANK", "4"}}), "RANK=4 with WORLD_SIZE=4: expected 0 to 3");
  REQUIRE_ERROR(find(by_hand + Variables{{"WORLD_SIZE", "0"}}), "WORLD_SIZE=0: expected 1 to 1048576");
  REQUIRE_ERROR(find(by_hand + Variables{{"WORLD_SIZE", "4294967295"}}),
                "WORLD_SIZE=4294967295: expected 1 to 1048576");
}

TEST_CASE("the first host of a Slurm node list", "[net]") {
  for (const auto& [list, host] :
       std::vector<std::pair<std::string, std::string>>{{"gpu5", "gpu5"},
                                                        {"gpu5,gpu6", "gpu5"},
                                                        {"node[01-03,7],gpu5", "node01"},
                                                        {"node[7,01-03]", "node7"},
                                                        {"r[1-2]n[0-3]", "r1n0"},
                                                        {"n[08-11]-ib0.site.org", "n08-ib0.site.org"},
                                                        {"a-b[3]", "a-b3"},
                                                        {"[10-12]", "10"}})
    REQUIRE(first_slurm_host(list) == host);
  for (const char* list : {"", ",a", "n[1-2", "n]", "n[]", "[]", "n[-2]", "n[[1]]", "n[a-b]", "n 1", "n[1 ]"})
    REQUIRE_ERROR(first_slurm_host(list), "is no list of Slurm nodes");
}

TEST_CASE("a launcher's terminal is nobody's, but for the one of srun --pty", "[net]") {
  REQUIRE(!launcher_has_output({}));
  REQUIRE(!launcher_has_output(batch));
  for (const Variables& variables :
       {open_mpi, mpich, step, daemon, step + step_pmix, step + step_pmi2, by_hand, torchrun})
    REQUIRE(launcher_has_output(variables));
  REQUIRE(launcher_has_output({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}));
  REQUIRE(launcher_has_output({}, {.rank = 0, .world_size = 2}));
  const Variables by_person = step + Variables{{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_PTY_PORT", "40011"}};
  for (const Variables& variables : {by_person, by_person + step_pmix, by_person + step_pmi2})
    REQUIRE(!launcher_has_output(variables));
  REQUIRE(launcher_has_output(by_person + open_mpi));
  REQUIRE(!launcher_has_output({{"RANK", "3"}}));  // without WORLD_SIZE: nobody's launcher
}
