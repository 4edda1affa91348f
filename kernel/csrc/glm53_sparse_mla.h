/* Sparse MLA attention without a rotary part (head size 512): the plain C interface.
 *
 * For token t and head h, with the rows j of KV that indices[t] names (K and V are the same row):
 *
 *     s[j]      = softmax_scale * kv_scale * dot(q[t, h], kv[j])
 *     out[t, h] = kv_scale * sum_j softmax(s)[j] * kv[j]
 *     lse[t, h] = ln(sum_j exp(s[j]))
 *
 * No torch and no Python: one library serves all of them. Nothing here allocates, synchronises or
 * keeps state between calls; whatever a launch needs beside its tensors is in the workspace that
 * the caller gives. So every call may be captured into a CUDA graph.
 *
 * Any function may be called from any thread. Functions return GLM53_OK, a GLM53_ERROR_*, or a
 * cudaError_t plus GLM53_ERROR_CUDA; glm53_error_string has the words for each.
 */
#ifndef GLM53_SPARSE_MLA_H
#define GLM53_SPARSE_MLA_H

#include <stdint.h>

#define GLM53_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Changes when a caller built against an older header would misread this library. */
#define GLM53_SPARSE_MLA_ABI 1

/* The only head size, in values: the latent width of the model. */
#define GLM53_SPARSE_MLA_WIDTH 512
#define GLM53_SPARSE_MLA_MAX_HEADS 64
/* The most that a block may use on sm_120 and sm_121, in bytes; every kernel here keeps to it. */
#define GLM53_SPARSE_MLA_MAX_SHARED 101376

enum {
  GLM53_OK = 0,
  GLM53_ERROR_STRUCT_SIZE = 1,     /* `size` is not that of this library's struct */
  GLM53_ERROR_NULL = 2,            /* a pointer that must be given is NULL */
  GLM53_ERROR_HEADS = 3,           /* heads is not in 1..64 */
  GLM53_ERROR_SHAPE = 4,           /* a negative tokens, width, rows, page_size or sm_count */
  GLM53_ERROR_KV_DTYPE = 5,        /* kv_dtype is none of GLM53_KV_* */
  GLM53_ERROR_ALIGNMENT = 6,       /* q, kv, out or workspace, or a stride of one, is not 16-byte
                                      aligned; or indices or lse is not 4-byte aligned */
  GLM53_ERROR_STRIDE = 7,          /* a stride is smaller than what lies between its steps */
  GLM53_ERROR_SPLITS = 8,          /* splits is negative or above GLM53_SPARSE_MLA_MAX_SPLITS */
  GLM53_ERROR_WORKSPACE = 9,       /* the workspace is smaller than this call needs */
  GLM53_ERROR_NO_DEVICE_CODE = 10, /* the library has no code for this GPU */
  GLM53_ERROR_SHARED_MEMORY = 11,  /* the GPU gives a block too little shared memory */
  GLM53_ERROR_SCALE = 12,          /* softmax_scale or kv_scale is not finite and above zero */
  GLM53_ERROR_CUDA = 1000          /* plus the cudaError_t */
};

enum {
  GLM53_KV_BF16 = 0,
  GLM53_KV_E4M3 = 1 /* OCP e4m3fn: no infinity, NaN is 0x7f and 0xff */
};

#define GLM53_SPARSE_MLA_MAX_SPLITS 64

/* GLM53_SPARSE_MLA_ABI of the library. */
GLM53_API int32_t glm53_sparse_mla_abi(void);

/* Words for a code of any function here; never NULL, never to be freed. */
GLM53_API const char* glm53_error_string(int32_t code);

/* 1 for a build that traps on rows outside 0..kv_rows-1 (-DGLM53_DEBUG), else 0. */
GLM53_API int32_t glm53_sparse_mla_is_debug(void);

/* What a GPU offers, and whether this library can use it. */
typedef struct glm53_device {
  uint32_t size;      /* in: sizeof(glm53_device) */
  int32_t capability; /* such as 120 for 12.0 */
  int32_t sm_count;
  int32_t shared_memory; /* bytes that a block may ask for (opt-in) */
  int32_t needed;        /* bytes that the largest kernel here asks for */
  int32_t code;          /* capability of the machine code that would run, such as 120; 0: none */
  int32_t is_supported;  /* 1 or 0 */
  char reason[256];      /* why not, as a sentence; "" where it is supported */
} glm53_device;

/* Fills `out` for CUDA device `device` (-1: the calling thread's current one). An unsupported GPU
 * is no error: is_supported is 0 then. Leaves the current device as it was. */
GLM53_API int32_t glm53_sparse_mla_query(int32_t device, glm53_device* out);

/* Bytes of workspace that are enough for every call with up to `tokens` tokens of these heads,
 * whatever its width, with exactly these `splits`, on a GPU with `sm_count` multiprocessors.
 *
 * splits 0 (automatic): independent of `tokens`; 2 * sm_count * 16*ceil-of-heads * 2 KB, so 8.7 MB
 * for 16 heads and 35 MB for 64 on 132 multiprocessors. splits 1: none. splits n > 1: tokens * n *
 * rows * 2 KB.
 *
 * It may hold anything, and holds nothing between calls. Two launches that may run at the same time
 * need two. */
GLM53_API int32_t glm53_sparse_mla_workspace(int64_t tokens, int32_t heads, int32_t splits,
                                             int32_t sm_count, uint64_t* bytes);

typedef struct glm53_sparse_mla_args {
  uint32_t size;    /* sizeof(glm53_sparse_mla_args) */
  int32_t kv_dtype; /* GLM53_KV_* */

  /* q [tokens, heads, 512] bf16, any finite values; strides in elements, multiples of 8. */
  const void* q;
  int64_t q_token_stride;
  int64_t q_head_stride;

  /* kv rows of 512 bf16 or e4m3. Row r starts at element
   *     r * kv_row_stride                                                        (page_size 0)
   *     (r / page_size) * kv_page_stride + (r % page_size) * kv_row_stride       (page_size > 0)
   * counted in 64 bits, so that a pool may have more than 2^31 elements and gaps between pages. The
   * strides in bytes are multiples of 16. kv_rows is how many there are: the debug build traps on
   * a row at or above it, the other build trusts the indices. */
  const void* kv;
  int64_t kv_rows;
  int64_t kv_row_stride;
  int64_t kv_page_stride;
  int32_t page_size;
  float kv_scale; /* what a stored value is multiplied with; 1 for plain bf16 */

  /* indices [tokens, width] int32, physical rows, in any order, duplicates counted as often as they
   * stand there. A negative one is masked wherever it stands, and no memory is read for it.
   * index_stride in elements, at least width. */
  const int32_t* indices;
  int64_t index_stride;

  /* out [tokens, heads, 512] bf16, strides as for q. A token whose indices are all masked gets
   * zeros. */
  void* out;
  int64_t out_token_stride;
  int64_t out_head_stride;

  /* lse [tokens, heads] fp32, contiguous, or NULL: natural logarithm, -inf for a masked token. */
  float* lse;

  int64_t tokens;
  int32_t heads; /* 1..64 */
  int32_t width; /* any, 0 too */

  /* Of the columns of `indices`, how many are usually used; 0 for all. Work is shared out by this
   * number. It changes speed and the place where a token is split, never which keys count: a valid
   * index beyond it is used like any other. */
  int32_t expected_width;

  float softmax_scale;

  /* 0: automatic. Work is spread over the GPU; where a token is split depends on tokens, width and
   *    the number of multiprocessors, and the last bits of the result with it.
   * n > 0: every token is split into n equal ranges of columns. Its bits depend on its own row of
   *    inputs, width, expected_width and n alone (batch-invariant); 1 needs no second pass.
   * With equal arguments the bits are equal in both modes, on every run. */
  int32_t splits;

  /* Multiprocessors to use; 0 for all of the current device. Automatic mode only. */
  int32_t sm_count;

  void* workspace; /* device memory, 16-byte aligned; may be NULL where it needs no bytes */
  uint64_t workspace_bytes;

  void* stream; /* cudaStream_t of the current device; NULL is the default stream */
} glm53_sparse_mla_args;

/* Enqueues the attention. Returns once it is enqueued; errors of the arguments and of the launch
 * are returned, errors while it runs come with a later CUDA call. tokens 0 does nothing. */
GLM53_API int32_t glm53_sparse_mla_forward(const glm53_sparse_mla_args* args);

#ifdef __cplusplus
}
#endif

#endif
