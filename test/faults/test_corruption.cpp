// Checkpoints that are damaged, incomplete or another run's: a run resumes from an older one and names what it found,
// or refuses; it ends with the bits of the run whose checkpoints nobody damaged.
#include <set>

#include "catch2.h"
#include "core/rng.h"
#include "faults/fault_run.h"

using namespace llmc;
namespace fs = std::filesystem;

namespace {

// A kind of damage to a checkpoint. other: the same step of a run with another seed; draw: where, and how much
struct Damage {
  const char* name;
  void (*inflict)(const std::string& checkpoint, const std::string& file, const std::string& other, uint64_t draw);
};

void overwrite(const std::string& file, int64_t at, const std::string& bytes) {
  std::fstream(file, std::ios::binary | std::ios::in | std::ios::out).seekp(at).write(bytes.data(), std::ssize(bytes));
}

const Damage damages[] = {
    {"a flipped bit",
     [](const std::string&, const std::string& file, const std::string&, uint64_t draw) {
       const std::string text = read_whole(file);
       const size_t at = (draw >> 8) % text.size();
       overwrite(file, static_cast<int64_t>(at), std::string(1, static_cast<char>(text[at] ^ (1 << (draw % 8)))));
     }},
    {"a sector of zeros",
     [](const std::string&, const std::string& file, const std::string&, uint64_t draw) {
       const size_t size = fs::file_size(file), at = (draw >> 8) % size / 512 * 512;
       overwrite(file, static_cast<int64_t>(at), std::string(std::min<size_t>(512, size - at), '\0'));
     }},
    {"a shorter file", [](const std::string&, const std::string& file, const std::string&,
                          uint64_t draw) { fs::resize_file(file, (draw >> 8) % fs::file_size(file)); }},
    {"a longer file", [](const std::string&, const std::string& file, const std::string&,
                         uint64_t draw) { fs::resize_file(file, fs::file_size(file) + 1 + (draw >> 8) % 1000); }},
    {"a missing file",
     [](const std::string&, const std::string& file, const std::string&, uint64_t) { fs::remove(file); }},
    {"a directory in place of a file", [](const std::string&, const std::string& file, const std::string&,
                                          uint64_t) { fs::remove(file), fs::create_directory(file); }},
    {"a file of another run",
     [](const std::string&, const std::string& file, const std::string& other, uint64_t) {
       fs::copy_file(other + "/" + fs::path(file).filename().string(), file, fs::copy_options::overwrite_existing);
     }},
    {"all but one file of another run",
     [](const std::string& checkpoint, const std::string& file, const std::string& other, uint64_t) {
       const std::string kept = read_whole(file);
       fs::remove_all(checkpoint), fs::copy(other, checkpoint);
       std::ofstream(file, std::ios::binary) << kept;
     }},
    {"another run's checkpoint", [](const std::string& checkpoint, const std::string&, const std::string& other,
                                    uint64_t) { fs::remove_all(checkpoint), fs::copy(other, checkpoint); }},
    {"an older checkpoint under its name",
     [](const std::string& checkpoint, const std::string&, const std::string&, uint64_t) {
       fs::remove_all(checkpoint), fs::copy(fs::path(checkpoint).parent_path() / "step-000006", checkpoint);
     }},
    {"two files that have changed places",
     [](const std::string& checkpoint, const std::string& file, const std::string&, uint64_t draw) {
       const std::vector<std::string> names = names_in(checkpoint);
       const std::string with = checkpoint + "/" + names[(draw >> 8) % names.size()];
       const std::string mine = read_whole(file), its = read_whole(with);
       std::ofstream(file, std::ios::binary) << its;
       if (with != file) std::ofstream(with, std::ios::binary) << mine;
     }},
};

// Returns how many damaged checkpoints runs of this layout were started on.
int damage_checkpoints(FaultRun run, int count, uint64_t seed) {
  run.options += " --keep-checkpoints 2";  // after steps 6, 9 and 12
  const TempDir dir(in_memory());
  const std::string whole = run.undisturbed(dir).first;
  FaultRun foreign = run;
  foreign.options += " --seed 77";
  REQUIRE(foreign.start(dir / "other", "").good());
  const Philox rng(seed, "damage" + run.name);
  int older = 0;
  for (int i = 0; i < count; ++i) {
    const uint64_t draw = rng.bits(2 * static_cast<uint64_t>(i)), more = rng.bits(2 * static_cast<uint64_t>(i) + 1);
    const std::string out = dir / "run", newest = checkpoint_path(out, 9);
    fs::copy(dir / "whole", out, fs::copy_options::recursive);
    fs::remove_all(checkpoint_path(out, 12));
    const Damage& damage = damages[draw % std::size(damages)];
    const std::vector<std::string> names = names_in(newest);
    const std::string file = names[(draw >> 32) % names.size()];
    damage.inflict(newest, newest + "/" + file, checkpoint_path(dir / "other", 9), more);
    const Ended r = run.start(out, "");
    INFO(run.name << ", " << damage.name << ", " << file << ", " << more << ": " << r.said);
    if (r.good()) {
      REQUIRE(result_of(out) == whole);
      older += r.said.find("resuming after step 6") != r.said.npos;
    } else {
      REQUIRE(r.all(1));
      REQUIRE(r.said.find(newest) != r.said.npos);
    }
    fs::remove_all(out);
  }
  REQUIRE(older > 0);
  return count;
}

}  // namespace

TEST_CASE("no damaged checkpoint is taken for a good one", "[faults][checkpoint]") {
  for (const FaultRun& run : fault_runs())
    if (run.processes == 1) damage_checkpoints(run, 6, 1);
}
TEST_CASE("none of 300 damaged checkpoints is taken for a good one", "[faults][checkpoint][long]") {
  int damaged = 0;
  for (uint64_t seed = 2; damaged < 300; ++seed)
    for (const FaultRun& run : fault_runs()) damaged += damage_checkpoints(run, 20, seed);
  WARN(damaged << " damaged checkpoints, none of which was taken for a good one");
}
