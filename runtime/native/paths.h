// The instruction paths that were compiled in; setup.py defines a macro for each beside the portable one.
#pragma once

#include "kernels.h"

namespace portable { extern const specpress::Path path; }
#ifdef SPECPRESS_AVX2
namespace avx2 { extern const specpress::Path path; }
#endif
#ifdef SPECPRESS_AVXVNNI
namespace avxvnni { extern const specpress::Path path; }
#endif
#ifdef SPECPRESS_AVX512
namespace avx512 { extern const specpress::Path path; }
#endif
#ifdef SPECPRESS_AMX_INT8
namespace amx_int8 { extern const specpress::Path path; }
#endif
#ifdef SPECPRESS_NEON_DOTPROD
namespace neon_dotprod { extern const specpress::Path path; }
#endif
#ifdef SPECPRESS_NEON_I8MM
namespace neon_i8mm { extern const specpress::Path path; }
#endif
