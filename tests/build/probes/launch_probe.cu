// What the host asks of the CUDA runtime when it launches a product: the runtime here only writes
// it down, so no device is needed. EXL3_HALF_BITS says which rate's object this is linked with.
//
//   launch_probe ARCHITECTURE SHARED_LIMIT      prints a line for each launch that the rate knows
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "linear/gemm.h"
#include "linear/plan.h"

namespace {

// By the address that the host code knows a kernel by.
std::map<const void*, std::string>& names() {
  static std::map<const void*, std::string> all;
  return all;
}
std::map<const void*, int> shared_allowed;
int wanted_rows, planned_blocks;
constexpr int kMultiprocessors = 100;

}  // namespace

extern "C" {
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* device, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  names()[host] = device;
}
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { std::abort(); }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  std::abort();
}
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { std::abort(); }

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) shared_allowed[kernel] = value;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  const auto size = [](dim3 d) { return d.x * d.y * d.z; };
  std::printf("%s rows=%d threads=%u planned_blocks=%d dynamic=%zu allowed=%d\n",
              names().at(kernel).c_str(), wanted_rows, size(config->blockDim), planned_blocks,
              config->dynamicSmemBytes,
              shared_allowed.count(kernel) != 0 ? shared_allowed[kernel] : 48 * 1024);
  return cudaSuccess;
}
}

int main(int count, char** arguments) {
  if (count != 3) return 2;
  using namespace exl3;
  for (const Family family : {Family::kHalves, Family::kByteSum}) {
    for (const Form form : {Form::kExact, Form::kFast}) {
      for (const int rows : {8, 16, 32, 64, 128}) {
        GemmParams params = {};
        params.m = wanted_rows = rows;
        params.k = 4096;
        params.strips = params.shard_count = params.positions = 1;
        GemmLaunch launch = {};
        launch.rows = rows;
        launch.form = form;
        launch.family = family;
        launch.room = gemm_room(std::atoi(arguments[1]));
        // Blocks of a multiprocessor that the plan for so many rows counts on; 0 when the plan is
        // another one and this kernel is there for calibration only.
        const DeviceFacts device{std::atoi(arguments[1]), kMultiprocessors,
                                 std::strtoll(arguments[2], nullptr, 10)};
        const Plan plan = make_plan(device, {rows, 4096, 1 << 20, EXL3_HALF_BITS, int(family)},
                                    {.exact = form == Form::kExact});
        const bool chosen =
            plan.kernel == Kernel::kGemm && plan.rows == rows && plan.form == int(form);
        planned_blocks = chosen ? plan.blocks / kMultiprocessors : 0;
        // Combinations that do not exist are refused before anything is launched.
        (void)launch_gemm<EXL3_HALF_BITS>(params, launch);
      }
    }
  }
}
