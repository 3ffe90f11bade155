#include "processor.h"

#if defined(__x86_64__) || defined(_M_X64)
#if defined(__GNUC__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace specpress {

namespace {

// AMX's tiles with products of bytes: leaf 7's bits 24 and 25 of EDX.
bool has_tiles() {
#if defined(__x86_64__) && defined(__GNUC__)
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 3) == 3;
#else
    return false;
#endif
}

// AMD's family of this processor: 15 and what is above it; 0: another maker's. Zen 3 and 4 are 25, Zen 5 is 26.
unsigned amd_family() {
#if (defined(__x86_64__) || defined(_M_X64)) && defined(__GNUC__)
    unsigned a, b, c, d;
    const bool amd = __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
    return amd && __get_cpuid(1, &a, &b, &c, &d) ? (a >> 8 & 15) + (a >> 20 & 255) : 0;
#else
    return 0;
#endif
}

// What comes after is taken for like it.
bool is_zen5() { return amd_family() >= 26; }

// Zen 4 has AVX-512.
bool is_zen3() { return amd_family() == 25 && !processor_has(AVX512); }

}  // namespace

const bool READS_LITTLE_AHEAD = is_zen5(), FETCHES_PAST_L2 = is_zen5(), READS_HARDLY_AHEAD = has_tiles() || is_zen3();

bool may_use_tiles() {
    // Linux saves tiles for processes only that have asked for it: ARCH_REQ_XCOMP_PERM of component 18, since 5.16.
#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}

bool processor_has(int64_t number) {
#if (defined(__x86_64__) || defined(_M_X64)) && defined(__GNUC__)
    __builtin_cpu_init();
    const bool two = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool wide = two && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    switch (number) {
#if defined(__x86_64__)
        case AMX_INT8: return wide && __builtin_cpu_supports("avx512vbmi") && has_tiles();
#endif
        case AVX512: return wide;
        case AVXVNNI: return two && __builtin_cpu_supports("avxvnni");
        case AVX2: return two;
        default: return number == PORTABLE;
    }
#elif defined(__aarch64__) && defined(__linux__)
    // Linux's HWCAP_ASIMDDP and HWCAP2_I8MM, which older headers do not know.
    const bool dot = getauxval(AT_HWCAP) >> 20 & 1, matrix = getauxval(AT_HWCAP2) >> 13 & 1;
    return number == PORTABLE || (number == NEON_DOTPROD && dot) || (number == NEON_I8MM && dot && matrix);
#elif defined(__aarch64__) && defined(__APPLE__)
    auto has = [](const char* name) {
        int32_t value = 0;
        size_t size = sizeof(value);
        return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
    };
    const bool dot = has("hw.optional.arm.FEAT_DotProd"), matrix = has("hw.optional.arm.FEAT_I8MM");
    return number == PORTABLE || (number == NEON_DOTPROD && dot) || (number == NEON_I8MM && dot && matrix);
#else
    return number == PORTABLE;
#endif
}

}  // namespace specpress
