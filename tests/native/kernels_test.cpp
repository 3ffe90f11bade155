// The kernels without Python, for the sanitizers: `kernels_test [SUBJECT …]`; no subject means all of them.
//
//   linear rows attention decoder pool    tests, on every path that this processor has; exit 0 when all hold
//   paths                                 prints the paths' names
//   digests                               rows, linear, attention and decoder, and a digest of what each path computed
//   overrun PATH, overflow, race          mistakes on purpose, to see that the sanitizers are awake
//
// Under the thread sanitizer (gcc's __SANITIZE_THREAD__) only what threads share is there: decoder, pool and race.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>

#include "check.h"
#include "paths.h"

// api.cpp; bit 1: this processor has the path's instructions.
extern "C" int64_t specpress_path(int64_t number);

namespace kernels_test {

void fail(const std::string& what) {
    std::fprintf(stderr, "failed: %s\n", what.c_str());
    std::exit(1);
}

void expect(bool holds, const std::string& what) {
    if (!holds) fail(what);
}

void expect_close(double found, double wanted, double tolerance, const std::string& what) {
    if (std::isnan(wanted) ? std::isnan(found) : std::fabs(found - wanted) <= tolerance) return;
    char text[160];
    std::snprintf(text, sizeof(text), ": found %.9g, expected %.9g within %.3g", found, wanted, tolerance);
    fail(what + text);
}

void expect_same(const Floats& found, const Floats& wanted, const std::string& what) {
    expect(found.size() == wanted.size(), what + ": sizes differ");
    for (size_t i = 0; i < found.size(); i++)
        if (std::memcmp(&found[i], &wanted[i], 4) != 0) fail(what + ": other bits at " + std::to_string(i));
}

namespace {
std::map<std::string, uint64_t> digests;  // by name and path
}

void record(const NamedPath& path, const std::string& what, const void* bytes, size_t size) {
    uint64_t& digest = digests[what + " " + path.name];
    const auto* p = static_cast<const uint8_t*>(bytes);
    for (size_t i = 0; i < size; i++) digest = (digest ^ p[i]) * 0x100000001b3ull;
    digest = (digest ^ size) * 0x100000001b3ull;
}

void record(const NamedPath& path, const std::string& what, const Floats& values) {
    Floats same = values;
    for (float& v : same)
        if (std::isnan(v)) v = std::fabs(NAN);
    record(path, what, same.data(), same.size() * sizeof(float));
}

void print_digests() {
    for (const auto& [name, digest] : digests) std::printf("digest %s %016llx\n", name.c_str(), static_cast<unsigned long long>(digest));
}

int64_t Random::whole(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
}

float Random::real(float low, float high) {
    return low + (high - low) * static_cast<float>(engine_() >> 40) / static_cast<float>(1 << 24);
}

Floats Random::reals(int64_t count, float low, float high) {
    Floats out(static_cast<size_t>(count));
    for (float& v : out) v = real(low, high);
    return out;
}

std::vector<int32_t> Random::order(int64_t count) {
    std::vector<int32_t> out(static_cast<size_t>(count));
    std::iota(out.begin(), out.end(), 0);
    for (int64_t i = count - 1; i > 0; i--) std::swap(out[i], out[whole(0, i)]);
    return out;
}

std::vector<NamedPath> paths() {
    std::vector<NamedPath> found;
    auto offer = [&](int64_t number, const char* name, const specpress::Path& path) {
        expect(specpress_path(number) & 1, std::string(name) + " is linked, but api.cpp does not know it");
        if (specpress_path(number) == 7) found.push_back({name, &path});
    };
#ifdef SPECPRESS_AMX_INT8
    offer(6, "amx_int8", amx_int8::path);
#endif
#ifdef SPECPRESS_AVX512
    offer(0, "avx512", avx512::path);
#endif
#ifdef SPECPRESS_AVXVNNI
    offer(1, "avxvnni", avxvnni::path);
#endif
#ifdef SPECPRESS_AVX2
    offer(2, "avx2", avx2::path);
#endif
#ifdef SPECPRESS_NEON_I8MM
    offer(5, "neon_i8mm", neon_i8mm::path);
#endif
#ifdef SPECPRESS_NEON_DOTPROD
    offer(4, "neon_dotprod", neon_dotprod::path);
#endif
    offer(3, "portable", portable::path);
    return found;
}

void overflow() {
    volatile int32_t most = INT32_MAX;
    most = most + 1;
}

}  // namespace kernels_test

using namespace kernels_test;

namespace {

void run(const std::string& subject) {
    if (subject == "pool") return test_pool();
    for (const NamedPath& path : paths()) {
        if (subject == "decoder") test_decoder(path);
#ifndef __SANITIZE_THREAD__
        else if (subject == "linear") test_linear(path);
        else if (subject == "rows") test_rows(path);
        else if (subject == "attention") test_attention(path);
        else if (subject == "basis") test_basis(path);
#endif
        else fail("no subject is called " + subject);
        std::printf("%s %s\n", subject.c_str(), path.name.c_str());
        std::fflush(stdout);
    }
}

}  // namespace

int main(int count, char** arguments) {
    std::vector<std::string> subjects(arguments + 1, arguments + count);
    if (subjects.empty()) subjects = {"pool", "rows", "linear", "attention", "basis", "decoder"};
    if (subjects[0] == "paths") {
        for (const NamedPath& path : paths()) std::printf("%s\n", path.name.c_str());
#ifndef __SANITIZE_THREAD__
    } else if (subjects[0] == "overrun") {
        for (const NamedPath& path : paths())
            if (subjects.size() > 1 && path.name == subjects[1]) overrun(path);
#endif
    } else if (subjects[0] == "overflow") {
        overflow();
    } else if (subjects[0] == "race") {
        race();
    } else if (subjects[0] == "digests") {
        for (const char* subject : {"rows", "linear", "attention", "basis", "decoder"}) run(subject);
        print_digests();
    } else {
        for (const std::string& subject : subjects) run(subject);
    }
    return 0;
}
