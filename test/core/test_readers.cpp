// Reading untrusted files: JSON within limits, regular files only, and messages that repeat little of their contents.
#include <sys/stat.h>

#include <chrono>

#include "catch2.h"
#include "core/json.h"
#include "core/safetensors.h"
#include "helpers.h"

using namespace llmc;

TEST_CASE("JSON is refused if it is nested deeply, has equal names, or anything behind it", "[core]") {
  auto refused = [](const std::string& text, const std::string& why) {
    INFO(shown(text));
    REQUIRE_ERROR(parse_json(text, "dir/file.json"), why);
    REQUIRE_ERROR(parse_json(text, "dir/file.json"), "dir/file.json: ");
    REQUIRE_FALSE(try_parse_json(text));
  };
  for (const std::string& open : {std::string("["), std::string("{\"a\":"), std::string("[{\"a\":")})
    for (const size_t depth : {size_t{65}, size_t{1'000'000}}) {
      std::string text;
      for (size_t i = 0; i < depth; ++i) text += open;
      refused(text, "nested more than 64 deep");
    }
  refused(std::string(1'000'000, '[') + std::string(1'000'000, ']'), "nested more than 64 deep");
  REQUIRE(parse_json(std::string(64, '[') + std::string(64, ']'), "x").is_array());
  refused(R"({"a":1,"b":{"a":2,"a":3}})", "names a twice");
  refused("{\"\x1b[2J\":1,\"\\u001b[2J\":1}", "not JSON");
  refused(R"({"\u001b[2J":1,"\u001b[2J":1})", "names \\x1b[2J twice");
  refused(std::string("{}\0", 3), "a NUL");
  refused(std::string("{\"a\":\"\0\"}", 9), "a NUL");
  refused("{} {}", "not JSON: parse error at line 1, column 4");
  refused("", "not JSON: parse error");
  refused("{\"a\":\n1e999}", "1e999");
  refused("\"" + std::string(100'000, 'a'), "... (");
  REQUIRE(parse_json(R"([{"a":[1,-2,3.5,true,null,"x\u0000y"]},{},[]])", "x") ==
          nlohmann::json::parse(R"([{"a":[1,-2,3.5,true,null,"x\u0000y"]},{},[]])"));
  const TempDir dir;
  std::ofstream(dir / "list.json") << "[1,2]";
  REQUIRE_ERROR(read_json(dir / "list.json"), "list.json: expected a JSON object, found [1,2]");
}

TEST_CASE("a header of a hundred thousand tensors is read in about a second", "[core]") {
  const TempDir dir;
  const std::string path = dir / "many.safetensors";
  std::string header = "{";
  for (int i = 0; i < 100'000; ++i)
    header += formatted("{}\"t{}\":{\"dtype\":\"F32\",\"shape\":[0,3],\"data_offsets\":[0,0]}", i > 0 ? "," : "", i);
  header += "}";
  const uint64_t length = header.size();
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(&length), 8) << header;
  const std::clock_t begin = std::clock();  // of this process: the machine may be busy
  REQUIRE(SafetensorsReader(path).names().size() == 100'000);
  REQUIRE(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC < 20);
}

TEST_CASE("only regular files are opened; a pipe, a device or a directory is refused at once", "[core]") {
  const TempDir dir;
  REQUIRE(mkfifo((dir / "pipe").c_str(), 0600) == 0);
  std::filesystem::create_directory(dir / "directory");
  std::filesystem::create_symlink("loop", dir / "loop");
  REQUIRE_ERROR(read_text(dir / "pipe"), "cannot open " + (dir / "pipe") + ": it is a pipe, expected a file");
  REQUIRE_ERROR(read_text("/dev/zero"), "/dev/zero: it is a device");
  REQUIRE_ERROR(read_text(dir / "directory"), "it is a directory");
  REQUIRE_ERROR(read_text(dir / "loop"), "loop: Too many levels of symbolic links");
  REQUIRE_ERROR(path_exists(dir / "loop"), "loop: Too many levels of symbolic links");
  REQUIRE_ERROR(File::append("/dev/null"), "/dev/null: it is a device");
  REQUIRE_ERROR(File::create(dir / "pipe"), dir / "pipe");
  std::ofstream(dir / "file") << "0123456789";
  REQUIRE(read_text(dir / "file", 10) == "0123456789");
  REQUIRE_ERROR(read_text(dir / "file", 9), "10 bytes are too many for a file of this kind, which has at most 9");
}

TEST_CASE("messages escape control characters and shorten long values", "[core]") {
  REQUIRE(shown("plain \xc3\xa9") == "plain \xc3\xa9");
  REQUIRE(shown("\x1b[2J\n\x7f") == "\\x1b[2J\\x0a\\x7f");
  REQUIRE(shown(std::string(81, 'x')) == std::string(80, 'x') + "... (81 bytes)");
  REQUIRE(shown("ab\xc3\xa9", 3) == "ab... (4 bytes)");  // no half of a character
  REQUIRE(shown(std::string("\x80\x80\x80\x80"), 2) == "... (4 bytes)");
  REQUIRE(formatted("{}", nlohmann::json{{"a", std::string("\x1b")}}) == R"({"a":"\u001b"})");
  REQUIRE(formatted("{}", nlohmann::json(std::string("\xff"))) == "\"\xef\xbf\xbd\"");
  REQUIRE(formatted("{}", nlohmann::json(std::string(500, 'x'))).size() < 120);
}

TEST_CASE("a pattern that no file matches says what is there instead", "[core]") {
  const TempDir dir;
  const auto refused = [&](const std::string& pattern) -> std::string {
    try {
      expand_glob(dir / pattern, "--train-data");
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const std::string where = std::filesystem::path(dir / "x").parent_path().string();
  REQUIRE(refused("train.bin") ==
          "--train-data " + where + "/train.bin: no such file: " + where + " has no file *.bin");
  REQUIRE(refused("train*.bin") ==
          "--train-data " + where + "/train*.bin: no file matches: " + where + " has no file *.bin");
  REQUIRE_THAT(refused("."),
               Catch::Matchers::EndsWith("is a directory: name its files with a quoted pattern, such as '" +
                                         (dir / ".") + "/*.bin'"));
  REQUIRE_ERROR(expand_glob(dir / ".", "--tokenize", ".txt"), "/*.txt'");
  for (const char* name : {"a_000000.bin", "a_000001.bin", "b.bin", "c.bin", "notes.txt"})
    write_text_durably(dir / name, "");
  REQUIRE_THAT(refused("train*.bin"),
               Catch::Matchers::ContainsSubstring(where + " has a_000000.bin, a_000001.bin, b.bin and 1 more"));
  REQUIRE_THAT(refused("a_"), Catch::Matchers::EndsWith(": no such file: " + where +
                                                        " has a_000000.bin, a_000001.bin: name them with a quoted "
                                                        "pattern, '" +
                                                        (dir / "a_") + "*.bin'"));
  REQUIRE(expand_glob(dir / "a_*.bin", "--train-data").size() == 2);
  REQUIRE_THAT(refused("train"),
               Catch::Matchers::EndsWith(where + " has a_000000.bin, a_000001.bin, b.bin and 2 more"));
  REQUIRE_THAT(refused("data/*.bin"),
               Catch::Matchers::ContainsSubstring("there is no directory " + where + "/data (data/README.md"));
  // A file whose name has characters of patterns, and one whose name cannot be recorded.
  write_text_durably(dir / "d[1].bin", "");
  REQUIRE(expand_glob(dir / "d[1].bin", "--train-data") == std::vector<std::string>{dir / "d[1].bin"});
  write_text_durably(dir / "caf\xe9.txt", "");
  REQUIRE_THAT(refused("caf*.txt"), Catch::Matchers::ContainsSubstring("caf\\xe9.txt: the file's name is not UTF-8"));
}
