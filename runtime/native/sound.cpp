// Whether a model's sizes fit each other.
#include "products.h"

namespace specpress {

bool sound(const Model& model) {
    // Rows of this many floats, and a few of them multiplied, fit 64 bits.
    constexpr int64_t most = 1 << 26, widest_head = 1024, most_experts = 1024;
    auto size = [](int64_t value) { return 1 <= value && value <= most; };
    auto fits = [](const Weights* w, int64_t outputs, int64_t inputs) { return w && w->outputs == outputs && w->inputs == inputs; };
    auto joined = [](const Projection& p, int64_t outputs, int64_t inputs) {
        for (int64_t i = 0; i < p.parts; i++) {
            if (!p.weights[i] || p.weights[i]->inputs != inputs) return false;
            outputs -= p.weights[i]->outputs;
        }
        return outputs == 0;
    };
    // Gates and their factors, whose products are what `down` takes.
    auto mlp = [&](const Projection& gate_up, const Weights* down) {
        return down && size(down->inputs) && down->inputs <= model.intermediate && down->outputs == model.hidden &&
               joined(gate_up, (model.gated ? 2 : 1) * down->inputs, model.hidden);
    };
    auto latent = [&](const Latent& l, const Layer& layer, const Heads& h) {
        if (l.rotated != h.rotated || !size(l.plain) || h.kv_heads != 1 || h.dim != l.rotated + h.value_dim || !l.norm) return false;
        const int64_t queries = h.heads * (l.rotated + l.plain), first = layer.qkv.parts == 2 ? layer.qkv.weights[0]->outputs : 0;
        if (l.query ? !l.query_norm || !fits(l.query, queries, first) : first != queries) return false;
        if (!joined(layer.qkv, first + h.dim, model.hidden)) return false;
        const int64_t value = l.values[0]->outputs;
        for (int64_t i = 0; i < h.heads; i++)
            if (!fits(l.keys[i], h.value_dim, l.plain) || !fits(l.values[i], value, h.value_dim) || !is_float(*l.keys[i]) || !is_float(*l.values[i]))
                return false;
        return fits(layer.out, model.hidden, h.heads * value);
    };
    const bool wants_parameters = model.activation == XIELU || model.activation == CLAMPED_SWIGLU;
    // Without layers it only projects (Decoder::project), by sizes that are the weights' own.
    if (!model.layers) return true;
    if (!size(model.groups) || !model.heads) return false;
    // Without attention there is one group, of no heads.
    const bool headless = model.groups == 1 && !model.heads->heads && !model.heads->kv_heads && !model.heads->dim;
    for (int64_t g = 0; g < model.groups; g++) {
        const Heads& h = model.heads[g];
        if (h.heads != model.heads->heads || h.cache_kind != model.heads->cache_kind) return false;
        if (!headless && (!size(h.heads) || !size(h.kv_heads) || h.heads % h.kv_heads || !size(h.dim) || h.dim > widest_head)) return false;
        if (h.rotated < 0 || h.rotated > h.dim || h.rotated % 2 || h.heads * h.dim > most || h.value_dim < 0 || h.value_dim > h.dim) return false;
    }
    if (model.inputs) {
        const LayerInputs& in = *model.inputs;
        if (!in.table || !size(in.size) || !size(model.layers * in.size) || !in.norm.weight) return false;
        if (!fits(in.projection, model.layers * in.size, model.hidden) || wants_parameters) return false;
    }
    if (model.layers < 0 || !size(model.hidden) || model.intermediate < 0 || model.intermediate > most || !size(model.vocabulary)) return false;
    if (!fits(model.head, model.vocabulary, model.hidden) || !model.norm.weight) return false;
    if (model.activation < SILU || model.activation > CLAMPED_SWIGLU || (model.activation == CLAMPED_SWIGLU && !model.gated)) return false;
    for (int64_t i = 0; i < model.layers; i++) {
        const Layer& layer = model.layer[i];
        if (layer.group < 0 || layer.group >= model.groups || layer.keys < 0 || layer.keys >= model.layers) return false;
        const Heads& h = model.heads[layer.group];
        const int64_t makes = layer.shares ? 0 : layer.keys_as_values ? 1 : 2;
        if (layer.rotary >= model.tables || (!layer.shares && !layer.query_norm != !layer.key_norm)) return false;
        if (wants_parameters && !layer.parameters) return false;
        if (layer.window < 0) return false;
        if (layer.mamba) {
            const Mamba& m = *layer.mamba;
            if (layer.convolution || layer.delta || m.count < 2 || !size(m.heads) || !size(m.groups) || m.heads % m.groups) return false;
            if (!size(m.dim) || !size(m.state) || !size(m.heads * m.dim) || !size(m.groups * m.state)) return false;
            if (!size(m.heads * m.dim * m.state) || !size(m.count * channels_of(m))) return false;
            if (!m.taps || !m.step || !m.rate || !m.skip || !fits(m.out, model.hidden, m.heads * m.dim)) return false;
            if (!fits(m.into, m.heads * m.dim + channels_of(m) + m.heads, model.hidden)) return false;
        }
        if (!layer.out) {
            if (layer.qkv.parts || layer.convolution || layer.delta || layer.latent || layer.gate) return false;
        } else if (layer.convolution) {
            const Convolution& c = *layer.convolution;
            if (c.count < 2 || !size(c.count * model.hidden) || !c.taps) return false;
            if (!fits(layer.out, model.hidden, model.hidden) || !joined(layer.qkv, 3 * model.hidden, model.hidden)) return false;
        } else if (layer.delta) {
            const Delta& d = *layer.delta;
            if (d.count < 2 || !size(d.key_heads) || !size(d.value_heads) || d.value_heads % d.key_heads || !size(d.key_dim) || !size(d.value_dim)) return false;
            const int64_t keys = d.key_heads * d.key_dim, values = d.value_heads * d.value_dim, channels = 2 * keys + values;
            if (!size(keys) || !size(values) || !size(d.count * channels) || !size(values * d.key_dim)) return false;
            if (!d.taps || !d.step || !d.rate || !d.query || !d.key || !d.norm) return false;
            if (!fits(layer.out, model.hidden, values) || !joined(layer.qkv, channels + values + 2 * d.value_heads, model.hidden)) return false;
        } else if (layer.latent) {
            if (layer.gate || !latent(*layer.latent, layer, h)) return false;
        } else if (headless || h.value_dim || !fits(layer.out, model.hidden, h.heads * h.dim) ||
                   !joined(layer.qkv, (h.heads + makes * h.kv_heads) * h.dim, model.hidden)) {
            return false;
        }
        if (layer.own) {
            if (!model.inputs || !fits(layer.own->gate, model.inputs->size, model.hidden)) return false;
            if (!fits(layer.own->out, model.hidden, model.inputs->size)) return false;
        }
        if (layer.gate && !fits(layer.gate, h.heads * h.dim, model.hidden) && !fits(layer.gate, h.heads, model.hidden)) return false;
        if (!layer.mixture) {
            if (!layer.down) continue;
            if (!mlp(layer.gate_up, layer.down)) return false;
            continue;
        }
        const Mixture& m = *layer.mixture;
        const Routing& to = m.routing;
        if (to.chosen < 1 || to.chosen > to.experts || to.experts > most_experts || !fits(m.router, to.experts, model.hidden)) return false;
        if (to.groups < 1 || to.groups > to.experts || to.experts % to.groups || to.groups_chosen < 1 || to.groups_chosen > to.groups) return false;
        if (to.group_best < 1 || to.group_best > to.experts / to.groups || to.chosen > to.groups_chosen * (to.experts / to.groups)) return false;
        if (to.scoring < SOFTMAX || to.scoring > SPARSE_MIXER) return false;
        if (m.shared_down && !mlp(m.shared_gate_up, m.shared_down)) return false;
        if (m.shared_gate && !fits(m.shared_gate, 1, model.hidden)) return false;
        if (const MlpBeside* b = m.beside) {
            if (!mlp(b->gate_up, b->down) || model.parallel) return false;
            for (const Norm* norm : {&b->mlp_output_norm, &b->router_norm, &b->input_norm, &b->output_norm})
                if (!norm->weight) return false;
        }
        for (int64_t e = 0; e < to.experts; e++)
            if (!mlp(m.gate_up[e], m.down[e])) return false;
    }
    return true;
}

}  // namespace specpress
