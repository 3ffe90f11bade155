// A chain drafted in one call: between two small forwards nothing but the choice of a token.
#include <algorithm>
#include <cmath>

#include "decoder.h"

namespace specpress {

namespace {

// Which token arrives first, each at its noise over its probability (noise.race); `best` is the most probable one.
int64_t race(const float* logits, int64_t limit, int64_t best, double temperature, const double* noise) {
    constexpr int64_t PART = 64;
    const double highest = logits[best], rate = 1.0 / temperature;
    int64_t first = best;
    double least = noise[best];
    double bounds[PART];
    for (int64_t begin = 0; begin < limit; begin += PART) {
        const int64_t count = std::min(PART, limit - begin);
        double lowest = INFINITY;
        // exp(x) is at least 1 + x + x² / 2: few need more.
        for (int64_t i = 0; i < count; i++) {
            const double x = (highest - logits[begin + i]) * rate;
            bounds[i] = noise[begin + i] * (1.0 + x + 0.5 * x * x);
            lowest = bounds[i] < lowest ? bounds[i] : lowest;
        }
        if (lowest >= least) continue;
        for (int64_t i = 0; i < count; i++) {
            if (bounds[i] >= least) continue;
            const double arrival = noise[begin + i] * std::exp((highest - logits[begin + i]) * rate);
            if (arrival < least) first = begin + i, least = arrival;
        }
    }
    return first;
}

}  // namespace

void Decoder::Growing::reach(int64_t requests, int64_t hidden_size, int64_t vocabulary) {
    if (requests > static_cast<int64_t>(owner.size())) {
        const size_t count = static_cast<size_t>(requests);
        for (std::vector<int64_t>* v : {&owner, &token, &position, &at, &zeros}) v->resize(count);
        chain.assign(count, -1);
        hidden.resize(count * static_cast<size_t>(hidden_size));
        logits.resize(count * static_cast<size_t>(vocabulary));
    }
}

bool Decoder::draft(const Batch& first, const Angles& angles, int64_t requests, const int64_t* steps, int64_t limit,
                    int64_t* tokens, int64_t stride, const ChainNoise* noise) {
    std::lock_guard<std::mutex> lock(one_);
    const int64_t vocabulary = model_.vocabulary;
    Growing& g = growing_;
    g.reach(requests, model_.hidden, vocabulary);
    // Rows of a request are adjacent: its last one stays.
    for (int64_t row = 0; row < first.rows; row++) g.at[first.request[row]] = row;
    for (int64_t i = 0; i < requests; i++) g.owner[i] = i, g.position[i] = first.position[g.at[i]];
    const Batch* batch = &first;
    Batch next = {0,              g.token.data(), g.owner.data(), g.position.data(), g.position.data(),
                  g.zeros.data(), g.chain.data(), nullptr,        first.stores};
    next.requests = first.requests;
    for (int64_t count = requests, step = 0; count; step++) {
        run(*batch, angles);
        read_out(g.at.data(), count, g.hidden.data(), g.logits.data());
        pool_.run(count, count * vocabulary < 16384 ? count : 1, [&](int, int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) {
                const float* logits = g.logits.data() + i * vocabulary;
                g.token[i] = path_.largest(logits, vocabulary, limit);
                const ChainNoise* own = noise ? noise + g.owner[i] : nullptr;
                if (own && own->steps && g.token[i] >= 0) g.token[i] = race(logits, limit, g.token[i], own->temperature, own->steps[step]);
            }
        });
        // Those that go on move up to the front; a row moves only after it was read.
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++) {
            const int64_t request = g.owner[i], token = g.token[i];
            if (token < 0) return false;
            tokens[request * stride + step] = token;
            if (step + 1 == steps[request]) continue;
            g.owner[kept] = request, g.token[kept] = token, g.position[kept] = g.position[i] + 1, g.at[kept] = kept;
            kept++;
        }
        count = next.rows = kept;
        batch = &next;
    }
    return true;
}

}  // namespace specpress
