// known_state.h: numbers with which tests fill a training state, and what a checkpoint made of them holds.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "run/checkpoints/checkpoint_write.h"

// f(element, value) for every element of an entry: a number that depends on the parameter, the kind and the place in
// the whole parameter alone.
template <class F>
void for_each_value(const llmc::StateEntry& e, F&& f) {
  using namespace llmc;
  const Philox numbers(3, e.param->name + e.name());
  with_type(e.tensor.dtype, [&]<class T>(type_tag<T>) {
    for (int64_t i = 0; i < e.tensor.numel(); ++i)
      f(e.tensor.data<T>()[i], T(static_cast<float>(numbers.uniform(static_cast<uint64_t>(e.elements().index(i))))));
  });
}

// The checkpoint's files whose names begin so.
inline std::vector<std::string> files_of(const std::string& path, const std::string& begin) {
  std::vector<std::string> files;
  for (const auto& [name, record] : llmc::read_manifest(path))
    if (name.starts_with(begin) && name.ends_with(".safetensors")) files.push_back(path + "/" + name);
  return files;
}
// The tensors for transformers, by name.
inline std::map<std::string, std::string> weights_of(const std::string& path) {
  std::map<std::string, std::string> all;
  for (const auto& file : llmc::open_all(files_of(path, "model")))
    for (const std::string& name : file->names()) {
      std::string& bytes = all[name];
      bytes.resize(static_cast<size_t>(file->info(name).bytes()));
      file->read(name, bytes.data());
    }
  return all;
}
