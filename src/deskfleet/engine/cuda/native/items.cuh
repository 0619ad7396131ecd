// What the kernels of experts have of each other's lists and outputs: an item, and an activation of one group.
#pragma once
#include "numbers.cuh"

struct Item {
    int expert, count;
};

DEVICE Item read_item(const int* items, int number) {
    const words2 both = load_fresh2(items + number * 2);
    return {(int)both.x, (int)both.y};
}

// Clamped SwiGLU and route weight of a lane's gate and up value, FP8 codes and scale of the warp's group `group` of row `place`
// of [rows, WIDTH] (oracle: reference.expert_activation).
template <int WIDTH>
DEVICE void store_activation(float gate, float value, float route, float limit, u64 place, int group, int lane, u8* out, u8* out_scales) {
    gate = fminf(bf16_rounded(gate), limit);
    value = fminf(fmaxf(bf16_rounded(value), -limit), limit);
    value = bf16_rounded(gate / (1.0f + fast_exp(-gate)) * value * route);
    const u32 bits = fp8_scale_bits(greatest_of_warp(fabsf(value)));
    out[place * WIDTH + group * 32 + lane] = fp8_code(value, bits);
    if (lane == 0) out_scales[place * (4 * ((WIDTH + 127) / 128)) + group] = (u8)(bits >> 23);
}
