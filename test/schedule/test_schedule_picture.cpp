// Pictures of schedules, checked by hand against their papers; the same as JSON.
#include "catch2.h"
#include "core/json.h"
#include "schedule/picture.h"

using namespace llmc;

// Huang et al. 2019, figure 2c, and Narayanan et al. 2021, figures 3 and 4: the last stage starts two forwards late,
// the backwards come back in two steps of two units each: 4 (1 + 2) + 2 (1 + 2) = 18 units, of which each stage
// idles 6.
TEST_CASE("a picture shows who does what when, what idles, what is kept, and the law", "[pp]") {
  REQUIRE(picture_of({Schedule::one_f_one_b, 3, 1, 4}) ==
          R"(1f1b: 3 stages, 4 micro-batches
F forward, B backward (twice as long), . idle; numbers: micro-batch
unit of time: the forward of a micro-batch through a stage

time     0              5              10             15
stage 0  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
stage 1  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
stage 2  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .

         idle    activations kept at most, in micro-batches
stage 0  33.3%   3
stage 1  33.3%   2
stage 2  33.3%   1
a step takes 18 forwards of a stage, 33.3% of it bubble; law: (P - 1) / (M + P - 1) = 33.3%)");
  REQUIRE(picture_of({Schedule::gpipe, 2, 1, 2}) ==
          R"(gpipe: 2 stages, 2 micro-batches
F forward, B backward (twice as long), . idle; numbers: micro-batch
unit of time: the forward of a micro-batch through a stage

time     0              5
stage 0  F0 F1 .  .  .  B0--- B1---
stage 1  .  F0 F1 B0--- B1--- .  .

         idle    activations kept at most, in micro-batches
stage 0  33.3%   2
stage 1  33.3%   2
a step takes 9 forwards of a stage, 33.3% of it bubble; law: (P - 1) / (M + P - 1) = 33.3%)");
}

// Qi et al. 2023, figures 2 and 3: the first stage idles until the first gradient has come, the last before its first
// forward, and nobody else. Stage s delays weight parts by s micro-batches.
TEST_CASE("zb-h1 fills the time of 1f1b's bubble with weight parts", "[pp]") {
  REQUIRE(picture_of({Schedule::zb_h1, 2, 1, 4}) ==
          R"(zb-h1: 2 stages, 4 micro-batches
F forward, B input part of the backward, W weight part, . idle; numbers: micro-batch
unit of time: the forward of a micro-batch through a stage

time     0              5              10
stage 0  F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
stage 1  .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3

         idle    activations kept at most, in micro-batches
stage 0  7.7%    2; for weight parts 1; together 2
stage 1  7.7%    1; for weight parts 2; together 2
a step takes 13 forwards of a stage, 7.7% of it bubble; law: (P - 1) / (3 M + P - 1) = 7.7%)");
}

// A slice goes back after those that attend to it. Stage 0 is one slice further ahead than stage 1: it keeps three of
// two per micro-batch. B1.1 waits until stage 1 has done it, at 11.
TEST_CASE("slices go forward from the first and back from the last", "[pp]") {
  REQUIRE(picture_of({Schedule::one_f_one_b, 2, 1, 2, 2}) ==
          R"(1f1b: 2 stages, 2 micro-batches in 2 slices
F forward, B backward (twice as long), . idle; numbers: micro-batch.slice
unit of time: the forward of a slice through a stage

time     0                        5                        10
stage 0  F0.0 F0.1 F1.0 .    .    B0.1----- F1.1 B0.0----- .    B1.1----- B1.0-----
stage 1  .    F0.0 F0.1 B0.1----- F1.0 B0.0----- F1.1 B1.1----- B1.0----- .    .

         idle    activations kept at most, in micro-batches
stage 0  20.0%   1.5
stage 1  20.0%   1
a step takes 7.5 forwards of a stage, 20.0% of it bubble; law: (P - 1) / (K M + P - 1) = 20.0%)");
}

TEST_CASE("a picture is wrapped at the terminal's width, and one that is too long is cut with a word", "[pp]") {
  const Pipeline p{Schedule::one_f_one_b, 2, 1, 3};  // 12 units
  const std::string wrapped = picture_of(p, {.width = 9 + 5 * 3});
  REQUIRE_THAT(wrapped, Catch::Matchers::ContainsSubstring("time     0\n"
                                                           "stage 0  F0 F1 .  .  B0-\n"
                                                           "stage 1  .  F0 B0--- F1\n"
                                                           "\n"
                                                           "time     5\n"
                                                           "stage 0  -- F2 B1--- .\n"
                                                           "stage 1  B1--- F2 B2---\n"
                                                           "\n"
                                                           "time     10\n"
                                                           "stage 0  B2---\n"
                                                           "stage 1  .  .\n"
                                                           "\n"));
  const std::string cut = picture_of(p, {.width = 9 + 5 * 3, .most_rows = 2});
  REQUIRE_THAT(cut, Catch::Matchers::ContainsSubstring("stage 1  B1--- F2 B2---\n... cut at time 10 of 12: "));
  REQUIRE_THAT(cut, !Catch::Matchers::ContainsSubstring("time     10"));
}

TEST_CASE("colours change no letter", "[pp]") {
  const Pipeline p{Schedule::zb_v, 2, 2, 4};
  const std::string plain = picture_of(p), coloured = picture_of(p, {.colour = true});
  std::string stripped;
  for (size_t i = 0; i < coloured.size(); ++i)
    if (coloured[i] == '\x1b') i = coloured.find('m', i);
    else stripped += coloured[i];
  REQUIRE(stripped == plain);
  REQUIRE_THAT(coloured, Catch::Matchers::ContainsSubstring("\x1b[30;46mF0.0\x1b[0m \x1b[30;46mF1.0\x1b[0m"));
  REQUIRE_THAT(coloured, Catch::Matchers::ContainsSubstring("\x1b[30;43mW0.1\x1b[0m"));
}

TEST_CASE("the last line counts forwards of whole stages, and says how often there is a bubble", "[pp]") {
  const auto has = [](const Pipeline& p, const std::string& text) {
    REQUIRE_THAT(picture_of(p), Catch::Matchers::ContainsSubstring(text));
  };
  has({Schedule::zb_v, 4, 2, 8}, "unit of time: the forward of a micro-batch through a chunk, 1/2 of a stage\n");
  has({Schedule::zb_v, 4, 2, 8}, "a step takes 25.5 forwards of a stage, 5.9% of it bubble; law: ");
  has({Schedule::pipedream, 4, 1, 8},
      "from one flush to the next, 8 micro-batches = 8 steps take 33 forwards of a stage, 27.3% of it bubble, which "
      "1f1b has in every step; law: ");
}

TEST_CASE("where there is no law, the picture says so", "[pp]") {
  REQUIRE_THAT(picture_of({Schedule::zb_h1, 4, 1, 3}),
               Catch::Matchers::ContainsSubstring("; there is no law for so few micro-batches"));
}

TEST_CASE("the JSON of a schedule has its actions and their times", "[pp]") {
  const nlohmann::json json = nlohmann::json::parse(schedule_json({Schedule::zb_h1, 2, 1, 4}));
  REQUIRE(json["schedule"] == "zb-h1");
  REQUIRE(json["makespan"] == 13);
  REQUIRE(json["law"] == "(P - 1) / (3 M + P - 1)");
  REQUIRE(json["bubble"] == json["bubble_by_law"]);
  REQUIRE(json["activations"] == nlohmann::json{2, 1});
  REQUIRE(json["for_weights"] == nlohmann::json{1, 2});
  std::vector<std::string> kinds;
  for (const auto& a : json["actions"][1])
    if (a["micro_batch"] == 0) kinds.push_back(a["kind"]);
  REQUIRE(kinds == std::vector<std::string>{"receive_activations", "forward", "backward_input", "send_gradients",
                                            "backward_weight"});
  REQUIRE(json["actions"][0][0] ==
          nlohmann::json::parse(R"({"kind": "forward", "chunk": 0, "micro_batch": 0, "slice": 0,)"
                                R"( "begin": 0.0, "end": 1.0})"));
}
