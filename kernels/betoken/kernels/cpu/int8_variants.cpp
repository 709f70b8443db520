// The int8 kernels of ops_int8.cpp compiled for other instructions, without torch's headers, which take longer to
// compile.
#include "int8_linear.h"

// Adds these candidates to the other library's if both read rows of the same layout.
extern "C" __attribute__((visibility("default"))) void betoken_int8_variants(void* candidates, bool has_byte_dots) {
  if (has_byte_dots == betoken::kHasByteDots) static_cast<betoken::Int8Candidates*>(candidates)->add_own();
}
