// gpu_peaks.h: datasheet peaks (dense tensor cores, memory bandwidth, NVLink) of the NVIDIA GPUs that run the kernels
// (sm_80 and later), by the name that the driver reports. Figures marked "*with sparsity" are twice these. GeForce
// cards accumulate in fp32 at half the rate of fp16, and advertise the latter.
#pragma once
#include <cctype>

#include "core/words.h"

namespace llmc {

struct GpuPeaks {
  const char* name;
  // TFLOP/s with fp32 accumulation, at the datasheet's boost clock, which some cards exceed. None: the chip lacks the
  // format, or no datasheet gives the figure.
  std::optional<double> bf16, fp8;
  std::optional<double> bandwidth;  // GB/s
  const char* source;
  // GB/s to the other GPUs of its server, through NVLink between any two: half of the datasheet's figure, which counts
  // both directions. None: not all GPUs of a server are linked.
  std::optional<double> link = std::nullopt;
};

namespace detail {

inline constexpr auto ampere = "NVIDIA Ampere GA102 GPU Architecture whitepaper";
inline constexpr auto ampere_site = "GeForce RTX 30 Series, nvidia.com: tensor TFLOPS (fp16 sums, sparse) / 4";
inline constexpr auto ada = "NVIDIA Ada GPU Architecture whitepaper";
inline constexpr auto ada_site = "GeForce RTX 40 Series, nvidia.com: AI TOPS (fp8, fp16 sums, sparse) / 8";
inline constexpr auto blackwell = "NVIDIA RTX Blackwell GPU Architecture whitepaper";
inline constexpr auto blackwell_site = "GeForce RTX 50 Series, nvidia.com: AI TOPS (fp4, sparse) / 16";
inline constexpr auto pro_blackwell = "RTX PRO 6000 Blackwell datasheets: AI TOPS (fp4, sparse) / 8";
inline constexpr std::nullopt_t na = std::nullopt;

inline constexpr GpuPeaks gpu_peaks_table[] = {
    // Data centres.
    {"A100 SXM4 40GB", 312, na, 1555, "NVIDIA A100 datasheet", 300},
    {"A100 PCIE 40GB", 312, na, 1555, "NVIDIA A100 datasheet"},
    {"A100 SXM 80GB", 312, na, 2039, "NVIDIA A100 80GB datasheet", 300},  // early drivers' name
    {"A100 SXM4 80GB", 312, na, 2039, "NVIDIA A100 80GB datasheet", 300},
    {"A100 80GB PCIe", 312, na, 1935, "NVIDIA A100 80GB datasheet"},
    {"A30", 165, na, 933, "NVIDIA A30 datasheet"},
    {"A40", 149.7, na, 696, "NVIDIA A40 datasheet"},
    {"A10", 125, na, 600, "NVIDIA A10 datasheet"},
    {"L4", 121, 242.5, 300, "NVIDIA L4 datasheet"},
    {"L40", 181.05, 362, 864, "NVIDIA L40 datasheet"},
    {"L40S", 362.05, 733, 864, "NVIDIA L40S datasheet"},
    {"H100 80GB HBM3", 989.5, 1979, 3350, "NVIDIA H100 datasheet, SXM", 450},
    {"H100 PCIe", 756.5, 1513, 2000, "NVIDIA H100 datasheet, PCIe"},
    {"H100 NVL", 835.5, 1670.5, 3900, "NVIDIA H100 datasheet, NVL"},
    {"H200", 989.5, 1979, 4800, "NVIDIA H200 datasheet, SXM", 450},
    {"H200 NVL", 835.5, 1670.5, 4800, "NVIDIA H200 datasheet, NVL"},
    {"H20", 148, 296, 4000, "NVIDIA HGX H20 datasheet", 450},
    {"GH200", 989.5, 1979, 4000, "NVIDIA GH200 Grace Hopper Superchip datasheet, HBM3"},
    {"GH200 144G HBM3e", 989.5, 1979, 4900, "NVIDIA GH200 Grace Hopper Superchip datasheet, HBM3e"},
    {"B200", 2250, 4500, 8000, "NVIDIA DGX B200 datasheet / 8", 900},
    {"GB200", 2500, 5000, 8000, "NVIDIA GB200 NVL72 datasheet / 72", 900},
    {"B300 SXM6 AC", 2250, 4500, 8000, "NVIDIA HGX B300 specifications / 8", 900},
    {"GB300", 2500, 5000, 8000, "NVIDIA GB300 NVL72 datasheet / 72", 900},
    // Workstations: these accumulate in fp32 at the full rate.
    {"RTX A4000", 76.7, na, 448, "NVIDIA RTX A4000 datasheet"},
    {"RTX A5000", 111.1, na, 768, "NVIDIA RTX A5000 datasheet"},
    {"RTX A6000", 154.8, na, 768, "NVIDIA RTX A6000 datasheet"},
    {"RTX 6000 Ada Generation", 364.2, 728.5, 960, ada},
    {"RTX PRO 6000 Blackwell Workstation Edition", 500, 1000, 1792, pro_blackwell},
    {"RTX PRO 6000 Blackwell Max Q Workstation Edition", 438.9, 877.8, 1792, pro_blackwell},
    {"GB10", na, na, 273, "NVIDIA DGX Spark datasheet, which gives only fp4"},
    // GeForce. Cards of the same name may differ in memory; the bandwidth is that of the first version.
    {"GeForce RTX 3060", 25.5, na, 360, ampere_site},
    {"GeForce RTX 3060 Ti", 32.4, na, 448, ampere_site},
    {"GeForce RTX 3070", 40.6, na, 448, ampere},
    {"GeForce RTX 3070 Ti", 43.5, na, 608, ampere_site},
    {"GeForce RTX 3080", 59.5, na, 760, ampere},
    {"GeForce RTX 3080 Ti", 68.2, na, 912, ampere_site},
    {"GeForce RTX 3090", 71, na, 936, ampere},
    {"GeForce RTX 3090 Ti", 80, na, 1008, ampere_site},
    {"GeForce RTX 4060", 30.2, 60.5, 272, ada_site},
    {"GeForce RTX 4060 Ti", 44.1, 88.2, 288, ada_site},
    {"GeForce RTX 4070", 58.2, 116.5, 504, ada_site},
    {"GeForce RTX 4070 SUPER", 71, 142, 504, ada_site},
    {"GeForce RTX 4070 Ti", 80.1, 160.2, 504, ada_site},
    {"GeForce RTX 4070 Ti SUPER", 88.2, 176.5, 672, ada_site},
    {"GeForce RTX 4080", 97.5, 194.9, 716.8, ada},
    {"GeForce RTX 4080 SUPER", 104.5, 209, 736, ada_site},
    {"GeForce RTX 4090", 165.2, 330.3, 1008, ada},
    {"GeForce RTX 5060", 38.4, 76.8, 448, blackwell_site},
    {"GeForce RTX 5060 Ti", 47.4, 94.9, 448, blackwell_site},
    {"GeForce RTX 5070", 61.7, 123.5, 672, blackwell},
    {"GeForce RTX 5070 Ti", 87.9, 175.8, 896, blackwell},
    {"GeForce RTX 5080", 112.6, 225.1, 960, blackwell},
    {"GeForce RTX 5090", 209.5, 419, 1792, blackwell},
};

// "NVIDIA A100-SXM4-80GB" -> a100, sxm4, 80gb: without the brand, which drivers have reported since 2021.
inline std::vector<std::string> words_of_gpu(std::string_view name) {
  std::string lower(name);
  for (char& c : lower) c = c == '-' ? ' ' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  std::vector<std::string> words = split(lower, ' ');
  std::erase_if(words, [](const std::string& word) { return word.empty() || word == "nvidia" || word == "tesla"; });
  return words;
}

inline bool is_memory_size(const std::string& word) {
  const size_t digits = word.find_first_not_of("0123456789");
  return digits != 0 && digits != std::string::npos && word.substr(digits) == "gb";
}

}  // namespace detail

// `name`: as in cudaDeviceProp. Returns the longest entry that the name begins with. Only a memory size may follow,
// because anything else ("Ti", "D", "Laptop GPU", "MIG 1g.10gb") means another chip or a part of one. None: unknown.
inline std::optional<GpuPeaks> gpu_peaks(std::string_view name) {
  const std::vector<std::string> words = detail::words_of_gpu(name);
  std::optional<GpuPeaks> found;
  size_t longest = 0;
  for (const GpuPeaks& row : detail::gpu_peaks_table) {
    const std::vector<std::string> row_words = detail::words_of_gpu(row.name);
    const auto n = static_cast<std::ptrdiff_t>(row_words.size());
    if (row_words.size() <= longest || row_words.size() > words.size() ||
        !std::equal(row_words.begin(), row_words.end(), words.begin()) ||
        !std::all_of(words.begin() + n, words.end(), detail::is_memory_size))
      continue;
    found = row;
    longest = row_words.size();
  }
  return found;
}

}  // namespace llmc
