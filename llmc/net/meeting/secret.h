// secret.h: the job's token, which its processes share and strangers do not know, and the cryptography that proves it
// without showing it: HMAC-SHA256 (RFC 2104) and random bytes, both of libcrypto.
#pragma once
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <sys/stat.h>

#include <cerrno>

#include "core/environment.h"
#include "core/files.h"

namespace llmc {

using Mac = std::array<unsigned char, 32>;    // a message authentication code
using Nonce = std::array<unsigned char, 16>;  // random bytes, used once

inline Mac hmac_sha256(const std::string& key, std::string_view message) {
  Mac mac{};
  unsigned length = 0;
  const bool good =
      HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
           reinterpret_cast<const unsigned char*>(message.data()), message.size(), mac.data(), &length) != nullptr;
  CHECK(good && length == mac.size(),
        "libcrypto has no HMAC-SHA256 here; without it processes cannot prove who they are");
  return mac;
}

// Takes the same time wherever they differ, so that nobody can guess a code byte by byte.
inline bool equal(const Mac& a, const Mac& b) { return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

inline Nonce random_nonce() {
  Nonce nonce{};
  CHECK(RAND_bytes(nonce.data(), static_cast<int>(nonce.size())) == 1, "libcrypto has no random bytes to give");
  return nonce;
}

inline std::string hexadecimal(const Nonce& nonce) {
  std::string text;
  for (const unsigned byte : nonce) text += detail::printf_string("%02x", byte);
  return text;
}

inline std::string random_token() { return hexadecimal(random_nonce()) + hexadecimal(random_nonce()); }

inline constexpr const char* how_to_make_a_token = "`head -c 32 /dev/urandom | base64` makes one";
inline constexpr const char* how_to_set_a_token =
    "it has no token: set TRAIN_GPT_TOKEN, or TRAIN_GPT_TOKEN_FILE to a file that only you can read, to the same value "
    "for all processes of the job; `head -c 32 /dev/urandom | base64` makes one";

namespace detail {

inline std::string token_in_file(const std::string& path) {
  constexpr const char* name = "TRAIN_GPT_TOKEN_FILE";
  struct stat info {};
  CHECK(::stat(path.c_str(), &info) == 0, "{}: cannot read {}: {}; {}", name, path, std::strerror(errno),
        how_to_make_a_token);
  CHECK((info.st_mode & 077) == 0, "{}: users other than its owner may access {} (its mode is {}): chmod 600 {}", name,
        path, printf_string("%03o", info.st_mode & 0777u), path);
  std::string token = read_text(path, 4096);
  while (!token.empty() && (token.back() == '\n' || token.back() == '\r')) token.pop_back();
  return token;
}

}  // namespace detail

// The token of TRAIN_GPT_TOKEN or of the file that TRAIN_GPT_TOKEN_FILE names; empty: there is none. Never an option,
// because everyone on a machine sees the command lines of all programs.
inline std::string read_token(const Environment& environment) {
  const std::optional<std::string> value = environment("TRAIN_GPT_TOKEN"), file = environment("TRAIN_GPT_TOKEN_FILE");
  CHECK(!value || !file, "TRAIN_GPT_TOKEN and TRAIN_GPT_TOKEN_FILE={} are both set: unset one of them", *file);
  if (!value && !file) return "";
  const std::string token = file ? detail::token_in_file(*file) : *value;
  CHECK(token.size() >= 16, "{} has a token of {} characters, which could be guessed; expected at least 16: {}",
        file ? "TRAIN_GPT_TOKEN_FILE=" + *file : "TRAIN_GPT_TOKEN", token.size(), how_to_make_a_token);
  return token;
}

}  // namespace llmc
