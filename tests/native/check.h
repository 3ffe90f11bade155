// What the tests of the kernels share: checks that stop at the first failure, seeded random numbers, instruction paths.
//
// Every buffer is a vector made at its exact size, so that the address sanitizer sees any read or write beyond it.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels.h"

namespace kernels_test {

using Floats = std::vector<float>;

// Prints what went wrong and exits with 1.
[[noreturn]] void fail(const std::string& what);
void expect(bool holds, const std::string& what);

// |found − wanted| ≤ tolerance for numbers; a NaN only where one is wanted.
void expect_close(double found, double wanted, double tolerance, const std::string& what);

// The same bits, NaNs included.
void expect_same(const Floats& found, const Floats& wanted, const std::string& what);

class Random {
   public:
    explicit Random(uint64_t seed) : engine_(seed) {}
    // low..high, both included.
    int64_t whole(int64_t low, int64_t high);
    float real(float low, float high);
    Floats reals(int64_t count, float low, float high);
    // 0..count−1 in some order.
    std::vector<int32_t> order(int64_t count);

   private:
    std::mt19937_64 engine_;
};

struct NamedPath {
    std::string name;
    const specpress::Path* kernels;
};

// Adds what a path computed to its digest of that name; a NaN counts as one, whatever its bits.
void record(const NamedPath& path, const std::string& what, const Floats& values);
void record(const NamedPath& path, const std::string& what, const void* bytes, size_t size);
// A line for each: its name, its path and 16 hexadecimal digits.
void print_digests();

// The paths that were compiled in and that this processor runs.
std::vector<NamedPath> paths();

// Each subject's tests, on one path; the pool's need none.
void test_linear(const NamedPath& path);
void test_rows(const NamedPath& path);
void test_attention(const NamedPath& path);
void test_basis(const NamedPath& path);
void test_decoder(const NamedPath& path);
void test_pool();

// Mistakes that a sanitizer must stop: products that read one byte too many; a signed overflow; an unguarded counter.
void overrun(const NamedPath& path);
void overflow();
void race();

}  // namespace kernels_test
