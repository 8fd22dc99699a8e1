// One kernel that keeps everything in registers, and one that cannot: its array is indexed by a
// number that only the run knows, so it lies in the stack frame.
extern "C" __global__ void stays_in_registers(float* x) {
  x[threadIdx.x] = 2.0f * x[threadIdx.x] + 1.0f;
}

extern "C" __global__ void needs_a_frame(float* x, int n) {
  float values[32];
  for (int i = 0; i < 32; ++i) values[i] = x[i * blockDim.x + threadIdx.x];
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) {
    const int j = static_cast<int>(sum) & 31;
    sum += values[j];
    values[(j + i) & 31] = sum;
  }
  x[threadIdx.x] = sum;
}

extern "C" __global__ void shares(float* x) {
  __shared__ float buffer[1024];
  buffer[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = buffer[1023 - threadIdx.x];
}
