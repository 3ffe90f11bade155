// A row of one head's gated delta rule (kernels/delta.py, step).
#include "kernels.h"
#include "vec.h"

namespace SPECPRESS_PATH {

using specpress::DeltaStep;

// Columns of the matrix do not meet: V vectors of them at once, from key to key. The matrix is read twice rather than
// written twice, and a block of it stays in the core's cache between.
template <int V>
static void columns(const DeltaStep& d, int64_t at) {
    const F16 left = set(d.left);
    F16 lacking[V], out[V];
    auto seen = [&](int64_t i, int n) { return d.from ? mul(load(d.from + i * d.values + at + n * LANES), left) : mul(zero(), left); };
    for (int64_t i = 0; i < d.keys; i++) {
        const F16 k = set(d.k[i]);
        for (int n = 0; n < V; n++) {
            const F16 product = mul(seen(i, n), k);
            lacking[n] = i ? add(lacking[n], product) : product;
        }
    }
    for (int n = 0; n < V; n++) lacking[n] = mul(sub(load(d.v + at + n * LANES), lacking[n]), set(d.share));
    for (int64_t i = 0; i < d.keys; i++) {
        const F16 k = set(d.k[i]), q = set(d.q[i]);
        for (int n = 0; n < V; n++) {
            const F16 now = add(seen(i, n), mul(k, lacking[n])), product = mul(now, q);
            store(d.to + i * d.values + at + n * LANES, now);
            out[n] = i ? add(out[n], product) : product;
        }
    }
    for (int n = 0; n < V; n++) store(d.out + at + n * LANES, out[n]);
}

static void column(const DeltaStep& d, int64_t at) {
    auto seen = [&](int64_t i) { return (d.from ? d.from[i * d.values + at] : 0.0f) * d.left; };
    float lacking = 0.0f, out = 0.0f;
    for (int64_t i = 0; i < d.keys; i++) {
        const float product = seen(i) * d.k[i];
        lacking = i ? lacking + product : product;
    }
    lacking = (d.v[at] - lacking) * d.share;
    for (int64_t i = 0; i < d.keys; i++) {
        const float now = seen(i) + d.k[i] * lacking, product = now * d.q[i];
        d.to[i * d.values + at] = now;
        out = i ? out + product : product;
    }
    d.out[at] = out;
}

void delta_step(const DeltaStep& d) {
    int64_t at = 0;
    for (; at + 4 * LANES <= d.values; at += 4 * LANES) columns<4>(d, at);
    for (; at + LANES <= d.values; at += LANES) columns<1>(d, at);
    for (; at < d.values; at++) column(d, at);
}

}  // namespace SPECPRESS_PATH
