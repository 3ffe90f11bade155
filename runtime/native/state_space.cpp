// A row of one head's state space (kernels/mamba.py, advance).
#include "kernels.h"
#include "vec.h"

namespace SPECPRESS_PATH {

using specpress::MambaStep;

// Columns of the matrix do not meet: V vectors of them at once, from one dimension of B and C to the next.
template <int V>
static void columns(const MambaStep& m, int64_t at) {
    const F16 left = set(m.left);
    F16 added[V], out[V];
    for (int n = 0; n < V; n++) added[n] = mul(load(m.x + at + n * LANES), set(m.step));
    for (int64_t i = 0; i < m.state; i++) {
        const F16 b = set(m.b[i]), c = set(m.c[i]);
        for (int n = 0; n < V; n++) {
            const int64_t place = i * m.dim + at + n * LANES;
            const F16 now = add(mul(m.from ? load(m.from + place) : zero(), left), mul(b, added[n])), product = mul(now, c);
            store(m.to + place, now);
            out[n] = i ? add(out[n], product) : product;
        }
    }
    for (int n = 0; n < V; n++) store(m.out + at + n * LANES, add(out[n], mul(load(m.x + at + n * LANES), set(m.skip))));
}

static void column(const MambaStep& m, int64_t at) {
    const float added = m.x[at] * m.step;
    float out = 0.0f;
    for (int64_t i = 0; i < m.state; i++) {
        const float now = (m.from ? m.from[i * m.dim + at] : 0.0f) * m.left + m.b[i] * added, product = now * m.c[i];
        m.to[i * m.dim + at] = now;
        out = i ? out + product : product;
    }
    m.out[at] = out + m.x[at] * m.skip;
}

void mamba_step(const MambaStep& m) {
    int64_t at = 0;
    for (; at + 4 * LANES <= m.dim; at += 4 * LANES) columns<4>(m, at);
    for (; at + LANES <= m.dim; at += LANES) columns<1>(m, at);
    for (; at < m.dim; at++) column(m, at);
}

}  // namespace SPECPRESS_PATH
