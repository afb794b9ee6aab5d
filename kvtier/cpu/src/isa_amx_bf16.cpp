// GCC knows these instructions without a flag; other compilers where they are told to (-mamx-bf16).
#if defined(KVTIER_EMULATED_TILES) || defined(__AMX_BF16__) || \
    (defined(__GNUC__) && !defined(__clang__) && __has_include(<amxbf16intrin.h>))
#if !defined(KVTIER_EMULATED_TILES) && !defined(__clang__)
#pragma GCC target("amx-tile,amx-bf16")
#endif
#define KVTIER_ISA amx_bf16
#define KVTIER_TILES 1
#include "simd_avx512.h"

#include "kernel.h"

const Kernel* amx_bf16_kernel() { return amx_bf16::kernel("amx_bf16"); }
#else
#include "tasks.h"

const Kernel* amx_bf16_kernel() { return nullptr; }
#endif
