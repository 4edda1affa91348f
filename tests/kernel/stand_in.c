/* The functions of glm53_sparse_mla.h, doing nothing: for tests of whoever loads the library. */
#include <stdint.h>

#ifndef ABI
#define ABI 1
#endif

int32_t glm53_sparse_mla_abi(void) { return ABI; }
const char* glm53_error_string(int32_t code) { return code ? "refused" : "ok"; }
int32_t glm53_sparse_mla_is_debug(void) { return 0; }
int32_t glm53_sparse_mla_query(int32_t device, void* out) { return 0 * device * (out != 0); }
int32_t glm53_sparse_mla_workspace(int64_t tokens, int32_t heads, int32_t splits, int32_t sm_count,
                                   uint64_t* bytes) {
  *bytes = 4096 + 0 * (tokens + heads + splits + sm_count);
  return 0;
}
#ifndef WITHOUT_FORWARD
int32_t glm53_sparse_mla_forward(const void* args) { return 0 * (args != 0); }
#endif
