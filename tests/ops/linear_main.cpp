// Runs exl3::linear on problems read from a file, without torch: for instruction sets that only an
// emulator can run here. Usage: linear_main PROBLEMS OUTPUTS
//
// PROBLEMS holds records of int32 {m, k, n, tile_words, codebook} followed by x float32 [m, k],
// suh and svh binary16 [k], [n], and the trellis; OUTPUTS receives y float32 [m, n] of each.
#include <cstdio>
#include <fstream>
#include <vector>

#include "cpu/linear.h"

namespace {

template <class T>
std::vector<T> read(std::ifstream& in, size_t count) {
  std::vector<T> values(count);
  in.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(count * sizeof(T)));
  return values;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  std::ifstream in(argv[1], std::ios::binary);
  std::ofstream out(argv[2], std::ios::binary);
  const exl3::cpu::ForRange serial = [](int64_t begin, int64_t end, int64_t,
                                        const std::function<void(int64_t, int64_t)>& f) {
    if (begin < end) f(begin, end);
  };
  std::printf("%s\n", exl3::cpu::isa_name(exl3::cpu::selected_isa()));
  while (in.peek() != std::ifstream::traits_type::eof()) {
    const auto head = read<int32_t>(in, 5);
    const size_t m = static_cast<size_t>(head[0]), k = static_cast<size_t>(head[1]),
                 n = static_cast<size_t>(head[2]), words = static_cast<size_t>(head[3]);
    const auto x = read<float>(in, m * k);
    const auto suh = read<uint16_t>(in, k), svh = read<uint16_t>(in, n);
    const auto trellis = read<uint16_t>(in, k / 16 * (n / 16) * words);
    std::vector<float> y(m * n);
    exl3::cpu::LinearProblem p{};
    p.x = x.data();
    p.y = y.data();
    p.dtype = exl3::cpu::Dtype::kFloat32;
    p.m = head[0];
    p.k = p.k_in = p.x_stride = head[1];
    p.n_total = head[2];
    p.shards.push_back(
        {trellis.data(), suh.data(), svh.data(), head[4], head[3], head[2], 0, head[2], 0});
    exl3::cpu::linear(p, serial);
    out.write(reinterpret_cast<const char*>(y.data()),
              static_cast<std::streamsize>(y.size() * sizeof(float)));
  }
  return out.good() ? 0 : 1;
}
