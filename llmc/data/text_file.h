// text_file.h: a file of text read from front to back, decompressed if it is gzip's or zstd's, whatever its name.
#pragma once
#include <zlib.h>
#include <zstd.h>
#include <zstd_errors.h>

#include "core/files.h"

namespace llmc {

class TextFile {
 public:
  explicit TextFile(const std::string& path) : file_(File::open_read(path)), size_(file_.size()), in_(block_bytes) {
    fill();
    const std::string_view start(in_.data(), in_end_);
    if (start.starts_with("\x1f\x8b")) {
      kind_ = Kind::gzip;
      gzip_ = {new z_stream{}, [](z_stream* stream) {
                 inflateEnd(stream);
                 delete stream;
               }};
      CHECK(inflateInit2(gzip_.get(), 15 + 16) == Z_OK, "{}: zlib cannot start: no memory", path);
    } else if (start.starts_with("\x28\xb5\x2f\xfd") || is_skippable_zstd_frame(start)) {
      kind_ = Kind::zstd;
      zstd_ = {ZSTD_createDCtx(), ZSTD_freeDCtx};
      CHECK(zstd_ != nullptr, "{}: no memory to decompress it", path);
      ZSTD_DCtx_setParameter(zstd_.get(), ZSTD_d_windowLogMax, ZSTD_dParam_getBounds(ZSTD_d_windowLogMax).upperBound);
    } else {
      for (const auto& [magic, kind, remedy] : others)
        CHECK(!start.starts_with(magic),
              "{}: a {} file, expected text or JSON lines, also compressed with gzip or zstd: {}", path, kind, remedy);
    }
  }

  const std::string& path() const { return file_.path(); }
  int64_t size() const { return size_; }         // of the file as it is
  int64_t position() const { return in_file_; }  // what of that has been read

  // out = the next bytes of the text; returns how many: fewer than `most` only at the end.
  size_t read(char* out, size_t most) {
    size_t done = 0;
    while (done < most) {
      const size_t n = kind_ == Kind::plain  ? copy(out + done, most - done)
                       : kind_ == Kind::gzip ? inflate_some(out + done, most - done)
                                             : decompress_some(out + done, most - done);
      if (n == 0) break;
      done += n;
    }
    return done;
  }

  // Skips the next bytes of the text; returns how many: fewer than `n` only at the end. Reads nothing of plain text.
  int64_t skip(int64_t n) {
    if (kind_ == Kind::plain) {
      const int64_t at = in_file_ - static_cast<int64_t>(in_end_ - in_at_);
      in_at_ = in_end_ = 0;
      in_file_ = at + std::min(n, size_ - at);
      return in_file_ - at;
    }
    std::string skipped(block_bytes, '\0');
    int64_t done = 0;
    while (done < n) {
      const size_t some = read(skipped.data(), static_cast<size_t>(std::min<int64_t>(n - done, block_bytes)));
      if (some == 0) break;
      done += static_cast<int64_t>(some);
    }
    return done;
  }

 private:
  enum class Kind : uint8_t { plain, gzip, zstd };
  struct Other {
    std::string_view magic;
    const char *kind, *remedy;
  };
  static constexpr Other others[] = {{"\xfd\x37zXZ", "xz", "decompress it: xz -d"},
                                     {"BZh", "bzip2", "decompress it: bunzip2"},
                                     {"PK\x03\x04", "zip", "decompress it: unzip"},
                                     {"PAR1", "Parquet", "data/tokenize_text.py makes shards of it"},
                                     {"ARROW1", "Arrow", "data/tokenize_text.py makes shards of it"}};
  // pzstd's files begin with one.
  static bool is_skippable_zstd_frame(std::string_view start) {
    return start.size() > 3 && (start[0] & 0xf0) == 0x50 && start.substr(1, 3) == "\x2a\x4d\x18";
  }
  static constexpr size_t block_bytes = 1 << 18;

  // Reads the next block of the file once the last is used up. False: the file has ended.
  bool fill() {
    if (in_at_ < in_end_) return true;
    in_at_ = 0;
    in_end_ = static_cast<size_t>(std::min<int64_t>(block_bytes, size_ - in_file_));
    file_.read_at(in_.data(), static_cast<int64_t>(in_end_), in_file_);
    in_file_ += static_cast<int64_t>(in_end_);
    return in_end_ > 0;
  }

  size_t copy(char* out, size_t most) {
    if (!fill()) return 0;
    const size_t n = std::min(most, in_end_ - in_at_);
    std::memcpy(out, in_.data() + in_at_, n);
    in_at_ += n;
    return n;
  }

  // Several compressed texts in one file are one text; zeros between them are padding.
  size_t inflate_some(char* out, size_t most) {
    z_stream& z = *gzip_;
    z.next_out = reinterpret_cast<Bytef*>(out);
    z.avail_out = static_cast<uInt>(std::min<size_t>(most, 1 << 30));
    const uInt room = z.avail_out;
    while (z.avail_out == room) {
      while (!within_ && fill() && in_[in_at_] == '\0') ++in_at_;
      const bool more = fill();
      if (!more && !within_) return 0;
      CHECK(more, "{}: damaged gzip data: it ends too early; get the file again", path());
      if (!within_) inflateReset(&z);
      within_ = true;
      z.next_in = reinterpret_cast<Bytef*>(in_.data() + in_at_);
      z.avail_in = static_cast<uInt>(in_end_ - in_at_);
      const int status = inflate(&z, Z_NO_FLUSH);
      in_at_ = in_end_ - z.avail_in;
      if (status == Z_STREAM_END) within_ = false;
      CHECK(status == Z_OK || status == Z_STREAM_END || status == Z_BUF_ERROR,
            "{}: damaged gzip data ({}) before byte {}; get the file again", path(), z.msg ? z.msg : "no reason given",
            in_file_);
    }
    return room - z.avail_out;
  }

  size_t decompress_some(char* out, size_t most) {
    ZSTD_outBuffer to{out, most, 0};
    while (to.pos == 0) {
      // The library may still hold text of what it was given.
      const bool more = fill();
      if (!more && !within_) return 0;
      ZSTD_inBuffer from{in_.data(), in_end_, in_at_};
      const size_t status = ZSTD_decompressStream(zstd_.get(), &to, &from);
      in_at_ = from.pos;
      CHECK(ZSTD_getErrorCode(status) != ZSTD_error_memory_allocation,
            "{}: no memory to decompress it: its window takes up to 2 GiB; compress it without zstd's --long", path());
      CHECK(!ZSTD_isError(status), "{}: damaged zstd data ({}) before byte {}; get the file again", path(),
            ZSTD_getErrorName(status), in_file_);
      within_ = status != 0;
      CHECK(more || to.pos > 0 || !within_, "{}: damaged zstd data: it ends too early; get the file again", path());
    }
    return to.pos;
  }

  File file_;
  int64_t size_, in_file_ = 0;
  std::vector<char> in_;  // a block of the file, of which in_at_ to in_end_ are unused
  size_t in_at_ = 0, in_end_ = 0;
  Kind kind_ = Kind::plain;
  bool within_ = false;  // within a compressed text
  std::unique_ptr<z_stream, void (*)(z_stream*)> gzip_{nullptr, nullptr};
  std::unique_ptr<ZSTD_DCtx, size_t (*)(ZSTD_DCtx*)> zstd_{nullptr, nullptr};
};

}  // namespace llmc
