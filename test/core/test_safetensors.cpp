// The safetensors format: round trips; each kind of damage has its own error; random damage never does harm.
#include "catch2.h"
#include "core/rng.h"
#include "core/safetensors.h"
#include "helpers.h"

using namespace llmc;

namespace {

// A file with this header and this many bytes of data.
void write_file(const std::string& path, const std::string& header, size_t data_bytes) {
  std::ofstream out(path, std::ios::binary);
  const uint64_t length = header.size();
  out.write(reinterpret_cast<const char*>(&length), 8);
  out << header << std::string(data_bytes, 'x');
}

}  // namespace

TEST_CASE("safetensors round-trip; damaged files are refused by name", "[core]") {
  const TempDir dir;
  const std::string path = dir / "t.safetensors";
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  const std::vector<bf16> b = {bf16(1.5f), bf16(-2)};
  {
    SafetensorsWriter w(path, {{"a", DType::fp32, {2, 3}}, {"b", DType::bf16, {2}}, {"scalar", DType::fp32, {}}});
    w.write(a.data(), 12);
    w.write(a.data() + 3, 12);
    w.write(b.data(), 4);
    w.write(a.data(), 4);
    w.finish();
  }
  {
    const SafetensorsReader r(path);
    REQUIRE(r.names() == std::vector<std::string>{"a", "b", "scalar"});
    REQUIRE(r.info("a").shape == std::vector<int64_t>{2, 3});
    std::vector<float> back(6);
    r.read("a", back.data());
    REQUIRE(back == a);
    REQUIRE_ERROR(r.info("c"), "no tensor c");
  }
  const std::string whole = read_whole(path);
  auto damaged = [&](const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  };
  REQUIRE_ERROR(SafetensorsReader(damaged(whole.substr(0, 5))), "t.safetensors");
  REQUIRE_ERROR(SafetensorsReader(damaged(whole.substr(0, 40))), "truncated");
  REQUIRE_ERROR(SafetensorsReader(damaged(whole.substr(0, whole.size() - 1))), "scalar");
  REQUIRE_ERROR(SafetensorsReader(damaged(std::string(whole).replace(8, 1, "["))), "not JSON");
  std::string other = whole;
  REQUIRE_ERROR(SafetensorsReader(damaged(other.replace(other.find("\"F32\""), 5, "\"F12\""))), "F12");
  REQUIRE_ERROR(SafetensorsReader(dir / "absent"), "absent");
}

TEST_CASE("each error in a safetensors header has its own message", "[core]") {
  const TempDir dir;
  const std::string path = dir / "t.safetensors";
  auto refused = [&](const std::string& header, const std::string& why, size_t data_bytes = 8) {
    INFO(header);
    write_file(path, header, data_bytes);
    REQUIRE_ERROR(SafetensorsReader(path), why);
    REQUIRE_ERROR(SafetensorsReader(path), "t.safetensors: ");
  };
  auto tensor = [](const std::string& shape, const std::string& offsets) {
    return R"({"a":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  write_file(path, tensor("[2]", "[0,8]"), 8);
  REQUIRE(SafetensorsReader(path).info("a").numel() == 2);
  write_file(path, tensor("[0,7]", "[0,0]"), 0);
  REQUIRE(SafetensorsReader(path).info("a").numel() == 0);
  write_file(path, "{}", 0);
  REQUIRE(SafetensorsReader(path).names().empty());

  refused(tensor("[-2]", "[0,8]"), "dimension -2, expected a non-negative integer");
  refused(tensor("[2.0]", "[0,8]"), "dimension 2.0, expected");
  refused(tensor("[\"2\"]", "[0,8]"), "dimension \"2\", expected");
  refused(tensor("[99999999999999999999]", "[0,8]"), "dimension 1e+20, expected");
  refused(tensor("[18446744073709551615]", "[0,8]"), "dimension 18446744073709551615, expected");
  refused(tensor("[4294967296,2147483648]", "[0,0]"), "more bytes than fit into 64 bits: [4294967296,2147483648]");
  refused(tensor("[4294967296,4294967296,4294967296]", "[0,0]"), "more bytes than fit into 64 bits");
  refused(tensor("2", "[0,8]"), "expected dtype, shape and data_offsets");
  refused(tensor("[2]", "[0]"), "data_offsets [0], expected two non-negative integers");
  refused(tensor("[2]", "[0,8,9]"), "data_offsets [0,8,9], expected two");
  refused(tensor("[2]", "[-8,0]"), "data_offsets [-8,0], expected two");
  refused(tensor("[2]", "[0.0,8.0]"), "data_offsets [0.0,8.0], expected two");
  refused(tensor("[2]", "[0,18446744073709551608]"), "expected two non-negative integers");
  refused(tensor("[2]", "{\"0\":8}"), "expected dtype, shape and data_offsets");
  refused(tensor("[2]", "[8,0]"), "lies at bytes 8 to 0 of 8");
  refused(tensor("[2]", "[8,16]"), "lies at bytes 8 to 16 of 8");
  refused(tensor("[2]", "[0,4]"), "its shape (2) needs 8");
  refused(tensor("[2]", "[4,12]"), "bytes 0 to 4, before tensor a, belong to no tensor", 12);
  refused(tensor("[2]", "[0,8]"), "bytes 8 to 12 at the end belong to no tensor", 12);
  refused(
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
      "tensor b begins at byte 4, before the previous one ends at 8", 12);
  refused(
      R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
      "names a twice");
  refused(R"({"a":{"dtype":"F16","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "names dtype twice");
  refused(R"({"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}})", "has dtype I64");
  refused(R"({"a":{"dtype":3,"shape":[1],"data_offsets":[0,8]}})", "expected dtype, shape and data_offsets");
  refused(R"({"a":[1,2]})", "the entry of tensor a is [1,2]");
  refused(R"({"a":null})", "the entry of tensor a is null");
  refused("[1]", "the header is [1], expected a JSON object");
  refused(std::string(100'000, '['), "nested more than 64 deep");
  refused("{\"a\xff\":1}", "not JSON");
  std::ofstream(path, std::ios::binary) << std::string(8, '\xff') << "{}";
  REQUIRE_ERROR(SafetensorsReader(path), "a header of 18446744073709551615 bytes in a file of 10");
}

TEST_CASE("a safetensors file with random damage is either refused or readable", "[core]") {
  const TempDir dir;
  const std::string path = dir / "t.safetensors";
  {
    SafetensorsWriter w(path, {{"a", DType::fp32, {2, 3}}, {"b", DType::bf16, {2}}, {"c", DType::fp64, {}}});
    w.write(std::string(36, 'x').data(), 36);
    w.finish();
  }
  const std::string whole = read_whole(path);
  const std::string pieces[] = {"9",
                                "-",
                                "0",
                                "\"",
                                ",",
                                "[",
                                "]",
                                "{",
                                "}",
                                ":",
                                "e9",
                                ".5",
                                "99999999999999999999",
                                "\"a\":",
                                "null",
                                "\xff",
                                std::string(1, '\0')};
  const Philox rng(1, "damage");
  int refused = 0, read = 0;
  for (uint64_t i = 0; i < 3000; ++i) {
    std::string bytes = whole;
    auto draw = [&, n = uint64_t{0}](uint64_t below) mutable { return rng.bits(64 * i + n++) % below; };
    for (uint64_t edits = 1 + draw(3); edits > 0; --edits) {
      const size_t at = draw(bytes.size());
      switch (draw(4)) {
        case 0: bytes[at] = static_cast<char>(bytes[at] ^ static_cast<char>(1 << draw(8))); break;
        case 1: bytes.erase(at, 1 + draw(9)); break;
        case 2: bytes.insert(at, pieces[draw(std::size(pieces))]); break;
        case 3: bytes.replace(at, 1, pieces[draw(std::size(pieces))]); break;
      }
      if (bytes.empty()) bytes = whole;
    }
    // Half of them keep the header's length valid, so that its JSON is parsed.
    if (draw(2) == 0 && bytes.size() > 44) {
      const uint64_t length = bytes.size() - 44;
      std::memcpy(bytes.data(), &length, 8);
    }
    std::ofstream(path, std::ios::binary) << bytes;
    try {
      const SafetensorsReader r(path);
      for (const std::string& name : r.names()) {
        REQUIRE(r.info(name).bytes() >= 0);
        REQUIRE(r.info(name).bytes() <= 44);
        char out[64];
        r.read(name, out);
      }
      ++read;
    } catch (const Error& error) {
      REQUIRE(std::string(error.what()).find("t.safetensors: ") != std::string::npos);
      ++refused;
    }
  }
  REQUIRE(refused > 1000);
  REQUIRE(read > 100);
}
