// The functions of glm53_sparse_mla.h: checks, the plan, and the launches.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>

#include "combine.cuh"
#include "config.cuh"
#include "forward.cuh"
#include "glm53_sparse_mla.h"
#include "params.cuh"
#include "plan.h"

namespace glm53 {

// ---- one entry a kernel

struct Kernel {
  const void* function;
  int32_t keys;
  int32_t rows;
  int32_t shared_bytes;
};

template <typename C>
Kernel kernel_of() {
  return {reinterpret_cast<const void*>(&forward<C>), C::kKeys, C::kRows, C::kSharedBytes};
}

static Kernel choose(int32_t kv_dtype, int32_t heads) {
  const bool is_fp8 = kv_dtype == GLM53_KV_E4M3;
  switch (padded_rows(heads)) {
    case 16:
      return is_fp8 ? kernel_of<Fp8Heads16>() : kernel_of<Bf16Heads16>();
    case 32:
      return is_fp8 ? kernel_of<Fp8Heads32>() : kernel_of<Bf16Heads32>();
    default:
      return is_fp8 ? kernel_of<Fp8Heads64>() : kernel_of<Bf16Heads64>();
  }
}

static int32_t most_shared_bytes() {
  int32_t most = 0;
  for (const int32_t dtype : {GLM53_KV_BF16, GLM53_KV_E4M3})
    for (const int32_t heads : {16, 32, 64})
      most = std::max(most, choose(dtype, heads).shared_bytes);
  return most;
}

static int32_t cuda_code(cudaError_t error) {
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction)
    return GLM53_ERROR_NO_DEVICE_CODE;
  return error == cudaSuccess ? GLM53_OK : GLM53_ERROR_CUDA + static_cast<int32_t>(error);
}

// ---- checks

static bool is_aligned(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

static int32_t check_shapes(const glm53_sparse_mla_args& a) {
  if (a.heads < 1 || a.heads > GLM53_SPARSE_MLA_MAX_HEADS) return GLM53_ERROR_HEADS;
  if (a.kv_dtype != GLM53_KV_BF16 && a.kv_dtype != GLM53_KV_E4M3) return GLM53_ERROR_KV_DTYPE;
  if (a.splits < 0 || a.splits > GLM53_SPARSE_MLA_MAX_SPLITS) return GLM53_ERROR_SPLITS;
  if (a.tokens < 0 || a.tokens > INT32_MAX / GLM53_SPARSE_MLA_MAX_SPLITS || a.width < 0 ||
      a.expected_width < 0 || a.kv_rows < 0 || a.page_size < 0 || a.sm_count < 0)
    return GLM53_ERROR_SHAPE;
  if (!(a.softmax_scale > 0) || !(a.kv_scale > 0) || std::isinf(a.softmax_scale) ||
      std::isinf(a.kv_scale))
    return GLM53_ERROR_SCALE;
  return GLM53_OK;
}

static int32_t check_memory(const glm53_sparse_mla_args& a) {
  const int64_t element = a.kv_dtype == GLM53_KV_BF16 ? 2 : 1;
  if (!a.q || !a.kv || !a.out || (!a.indices && a.width)) return GLM53_ERROR_NULL;
  if (!a.workspace && a.workspace_bytes) return GLM53_ERROR_NULL;
  for (const void* pointer :
       {a.q, a.kv, static_cast<const void*>(a.out), static_cast<const void*>(a.workspace)})
    if (!is_aligned(pointer, 16)) return GLM53_ERROR_ALIGNMENT;
  if (!is_aligned(a.indices, 4) || !is_aligned(a.lse, 4)) return GLM53_ERROR_ALIGNMENT;
  for (const int64_t stride :
       {a.q_token_stride * 2, a.q_head_stride * 2, a.out_token_stride * 2, a.out_head_stride * 2,
        a.kv_row_stride * element, a.page_size ? a.kv_page_stride * element : 0})
    if (stride % 16) return GLM53_ERROR_ALIGNMENT;
  // A token's heads must not overlap in out; q may repeat, but never by accident.
  for (const int64_t stride : {a.q_head_stride, a.out_head_stride})
    if (stride < GLM53_SPARSE_MLA_WIDTH && a.heads > 1) return GLM53_ERROR_STRIDE;
  for (const int64_t stride : {a.q_token_stride, a.out_token_stride})
    if (stride < GLM53_SPARSE_MLA_WIDTH && a.tokens > 1) return GLM53_ERROR_STRIDE;
  if (a.kv_row_stride < GLM53_SPARSE_MLA_WIDTH) return GLM53_ERROR_STRIDE;
  if (a.page_size && a.kv_page_stride < GLM53_SPARSE_MLA_WIDTH) return GLM53_ERROR_STRIDE;
  if (a.index_stride < a.width && a.tokens > 1) return GLM53_ERROR_STRIDE;
  return GLM53_OK;
}

// ---- parameters

static Pool make_pool(const glm53_sparse_mla_args& a) {
  const int64_t element = a.kv_dtype == GLM53_KV_BF16 ? 2 : 1;
  Pool pool{static_cast<const uint8_t*>(a.kv), a.kv_row_stride * element, 0, 0, 0, a.kv_rows};
  if (a.page_size == 1) pool.row_bytes = a.kv_page_stride * element;
  if (a.page_size < 2) return pool;
  pool.page_gap = a.kv_page_stride * element - a.page_size * pool.row_bytes;
  uint32_t bits = 0;
  while ((int64_t{1} << bits) < a.page_size) ++bits;
  pool.page_factor = static_cast<uint32_t>((uint64_t{1} << (31 + bits)) / a.page_size + 1);
  pool.page_shift = bits - 1;
  return pool;
}

static Params make_params(const glm53_sparse_mla_args& a, const Plan& plan, int32_t rows,
                          int64_t slots) {
  constexpr float kLog2E = 1.4426950408889634f;
  Params p{};
  p.plan = plan.schedule;
  p.kv = make_pool(a);
  p.q = static_cast<const __nv_bfloat16*>(a.q);
  p.q_token_stride = a.q_token_stride;
  p.q_head_stride = a.q_head_stride;
  p.indices = a.indices;
  p.index_stride = a.index_stride;
  p.out = static_cast<__nv_bfloat16*>(a.out);
  p.out_token_stride = a.out_token_stride;
  p.out_head_stride = a.out_head_stride;
  p.lse = a.lse;
  p.heads = a.heads;
  p.width = a.width;
  p.score_scale = a.softmax_scale * a.kv_scale * kLog2E;
  p.out_scale = a.kv_scale;
  p.rows = rows;
  p.part_lse = static_cast<float*>(a.workspace);
  p.part_out = p.part_lse + slots * rows;
  return p;
}

template <int kGroups, int kColumnWarps>
static cudaError_t launch_combine(const Params& p, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(p.plan.tokens - first_split_token(p.plan)) * p.heads;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(rows), kWidth / (kColumnWarps * 32 * 4));
  config.blockDim = dim3(kGroups * kColumnWarps * 32);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, combine<kGroups, kColumnWarps>, p);
}

static cudaError_t launch_combine(const Plan& plan, const Params& p, cudaStream_t stream) {
  return plan.parts <= kFewParts ? launch_combine<1, 4>(p, stream)
                                 : launch_combine<8, 1>(p, stream);
}

static int32_t launch(const Kernel& kernel, const Plan& plan, const Params& p,
                      cudaStream_t stream) {
  // Set on every call: the attribute belongs to the current device, and a flag of ours that said
  // "done" would outlive a reset of it.
  cudaError_t error = cudaFuncSetAttribute(
      kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return error == cudaErrorInvalidValue ? GLM53_ERROR_SHARED_MEMORY : cuda_code(error);
  }
  Params copy = p;
  void* arguments[] = {&copy};
  error = cudaLaunchKernel(kernel.function, dim3(plan.blocks), dim3(kThreads), arguments,
                           kernel.shared_bytes, stream);
  if (error == cudaSuccess && plan.parts > 1) error = launch_combine(plan, p, stream);
  return cuda_code(error);
}

static int32_t describe(int32_t device, glm53_device& out) {
  const struct {
    cudaDeviceAttr attribute;
    int32_t* value;
  } wanted[] = {{cudaDevAttrMultiProcessorCount, &out.sm_count},
                {cudaDevAttrMaxSharedMemoryPerBlockOptin, &out.shared_memory}};
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  for (const auto& [attribute, value] : wanted)
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
  if (error != cudaSuccess) return cuda_code(error);
  out.capability = major * 10 + minor;
  out.needed = most_shared_bytes();

  cudaFuncAttributes attributes{};
  error = cudaFuncGetAttributes(&attributes, choose(GLM53_KV_BF16, 16).function);
  cudaGetLastError();
  out.code = error == cudaSuccess ? attributes.binaryVersion : 0;
  if (error != cudaSuccess && cuda_code(error) != GLM53_ERROR_NO_DEVICE_CODE)
    return cuda_code(error);
  if (error != cudaSuccess)
    std::snprintf(out.reason, sizeof(out.reason),
                  "expected a GPU that this library has code for (9.0, 12.0, 12.1), found compute "
                  "capability %d.%d",
                  major, minor);
  else if (out.shared_memory < out.needed)
    std::snprintf(out.reason, sizeof(out.reason),
                  "expected %d bytes of shared memory for a block, found %d", out.needed,
                  out.shared_memory);
  out.is_supported = out.reason[0] == '\0';
  return GLM53_OK;
}

}  // namespace glm53

using namespace glm53;

extern "C" {

int32_t glm53_sparse_mla_abi(void) { return GLM53_SPARSE_MLA_ABI; }

int32_t glm53_sparse_mla_is_debug(void) {
#ifdef GLM53_DEBUG
  return 1;
#else
  return 0;
#endif
}

const char* glm53_error_string(int32_t code) {
  switch (code) {
    case GLM53_OK:
      return "no error";
    case GLM53_ERROR_STRUCT_SIZE:
      return "the caller's struct has another size; mixed builds";
    case GLM53_ERROR_NULL:
      return "a pointer is NULL that must be given";
    case GLM53_ERROR_HEADS:
      return "expected 1 to 64 heads";
    case GLM53_ERROR_SHAPE:
      return "a count or width is negative or too large";
    case GLM53_ERROR_KV_DTYPE:
      return "expected kv_dtype 0 (bf16) or 1 (e4m3)";
    case GLM53_ERROR_ALIGNMENT:
      return "expected q, kv, out, workspace and their strides in multiples of 16 bytes, indices "
             "and lse of 4";
    case GLM53_ERROR_STRIDE:
      return "a stride is smaller than what lies between its steps";
    case GLM53_ERROR_SPLITS:
      return "expected 0 to 64 splits";
    case GLM53_ERROR_WORKSPACE:
      return "the workspace is smaller than glm53_sparse_mla_workspace says";
    case GLM53_ERROR_NO_DEVICE_CODE:
      return "the library has no code for this GPU";
    case GLM53_ERROR_SHARED_MEMORY:
      return "the GPU gives a block too little shared memory";
    case GLM53_ERROR_SCALE:
      return "expected softmax_scale and kv_scale finite and above zero";
    default:
      break;
  }
  if (code >= GLM53_ERROR_CUDA)
    return cudaGetErrorString(static_cast<cudaError_t>(code - GLM53_ERROR_CUDA));
  return "unknown error code";
}

int32_t glm53_sparse_mla_query(int32_t device, glm53_device* out) {
  if (!out) return GLM53_ERROR_NULL;
  if (out->size != sizeof(glm53_device)) return GLM53_ERROR_STRUCT_SIZE;
  *out = {};
  out->size = sizeof(glm53_device);
  int previous = 0;
  cudaError_t error = cudaGetDevice(&previous);
  if (error != cudaSuccess) return cuda_code(error);
  if (device < 0 || device == previous) return describe(previous, *out);
  error = cudaSetDevice(device);
  if (error != cudaSuccess) return cuda_code(error);
  const int32_t code = describe(device, *out);
  error = cudaSetDevice(previous);
  return code != GLM53_OK ? code : cuda_code(error);
}

int32_t glm53_sparse_mla_workspace(int64_t tokens, int32_t heads, int32_t splits, int32_t sm_count,
                                   uint64_t* bytes) {
  if (!bytes) return GLM53_ERROR_NULL;
  if (heads < 1 || heads > GLM53_SPARSE_MLA_MAX_HEADS) return GLM53_ERROR_HEADS;
  if (splits < 0 || splits > GLM53_SPARSE_MLA_MAX_SPLITS) return GLM53_ERROR_SPLITS;
  if (tokens < 0 || tokens > INT32_MAX / GLM53_SPARSE_MLA_MAX_SPLITS || sm_count < 1)
    return GLM53_ERROR_SHAPE;
  *bytes = workspace_size(slot_count(tokens, splits, sm_count), padded_rows(heads));
  return GLM53_OK;
}

int32_t glm53_sparse_mla_forward(const glm53_sparse_mla_args* args) {
  if (!args) return GLM53_ERROR_NULL;
  if (args->size != sizeof(glm53_sparse_mla_args)) return GLM53_ERROR_STRUCT_SIZE;
  int32_t code = check_shapes(*args);
  if (code != GLM53_OK || args->tokens == 0) return code;
  code = check_memory(*args);
  if (code != GLM53_OK) return code;

  int32_t sm_count = args->sm_count;
  if (!sm_count) {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
      error = cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return cuda_code(error);
  }
  const Kernel kernel = choose(args->kv_dtype, args->heads);
  const int64_t slots = slot_count(args->tokens, args->splits, sm_count);
  if (args->workspace_bytes < workspace_size(slots, kernel.rows)) return GLM53_ERROR_WORKSPACE;
  const Plan plan = make_plan(static_cast<int32_t>(args->tokens), args->width, args->expected_width,
                              args->splits, kernel.keys, sm_count);
  return launch(kernel, plan, make_params(*args, plan, kernel.rows, slots),
                static_cast<cudaStream_t>(args->stream));
}

}  // extern "C"
