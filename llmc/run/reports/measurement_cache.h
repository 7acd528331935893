// measurement_cache.h: what was measured on this machine is kept for later runs, in files of the user's cache
// directory.
#pragma once
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "core/environment.h"
#include "core/files.h"
#include "core/json.h"

namespace llmc {

// What was measured before, by what it is of: a JSON object in a file of the user's cache directory. Works without a
// readable or writable cache: then it is measured again.
class MeasurementCache {
 public:
  explicit MeasurementCache(const std::string& name) : file_(cache_directory() + "/" + name) {
    try {
      if (path_exists(file_)) all_ = read_json(file_);
    } catch (const Error&) {
    }
    if (!all_.is_object()) all_ = nlohmann::json::object();
  }
  // Null: there is none, or it is older than `seconds`.
  nlohmann::json find(const std::string& key, double seconds = std::numeric_limits<double>::infinity()) const {
    if (!all_.contains(key) || !all_[key].is_object()) return {};
    const nlohmann::json& entry = all_[key];
    const double age = entry.contains("measured_at") && entry["measured_at"].is_number()
                           ? now() - entry["measured_at"].get<double>()
                           : -1;
    return age >= 0 && age < seconds ? entry : nlohmann::json();
  }
  // seconds: what is older goes
  void keep(const std::string& key, nlohmann::json entry, double seconds = std::numeric_limits<double>::infinity()) {
    std::erase_if(all_.get_ref<nlohmann::json::object_t&>(),
                  [&](const auto& e) { return find(e.first, seconds).is_null(); });
    entry["measured_at"] = now();
    all_[key] = std::move(entry);
    std::error_code ignored;
    std::filesystem::create_directories(cache_directory(), ignored);
    try {
      write_text_durably(file_, all_.dump(1) + "\n");
    } catch (const Error&) {
    }
  }
  const std::string& file() const { return file_; }

 private:
  static double now() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  }

  std::string file_;
  nlohmann::json all_ = nlohmann::json::object();
};

}  // namespace llmc
