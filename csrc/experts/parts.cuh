// What a cluster computes one after the other.
#pragma once

#include "experts/work.cuh"
#include "gemm/mainloop.cuh"

namespace weave::moe_experts {

// One CTA's part of an item.
struct Part {
    int32_t expert;
    int32_t first;   // position, among rows sorted by expert
    int32_t rows;    // up to 8 * octets
    int32_t octets;  // that are multiplied; of both CTAs as many
    int32_t last;    // position of the expert
    int32_t column;  // of tiles
};

// This CTA's part of a tile's `rows`. kWide: it has all of them, else half.
template <bool kWide>
__device__ __forceinline__ Part part_of(int32_t expert, Rows rows, int32_t last, int32_t column) {
    const int32_t octets = octets_of(rows.count);
    const Rows own = kWide ? rows : own_rows(rows, static_cast<int32_t>(gemm::cluster_rank()));
    return {expert, own.first, own.count, kWide ? 2 * octets : octets, last, column};
}

// A cluster's parts. The next one is read while this one is worked on. kWide: each CTA has all of the tile's rows,
// else half of them.
template <bool kWide>
class Parts {
  public:
    __device__ __forceinline__ explicit Parts(const Work& work)
        : work_(work), items_{work.table[0], work.columns, work.group}, index_(gemm::cluster_index()) {
        read();
    }
    // Whether there is one.
    __device__ __forceinline__ bool take(Part& part) {
        if (index_ >= items_.num_items()) return false;
        const Rows rows = even_rows(record_.w, record_.y, record_.z, work_.tile_rows);
        part = part_of<kWide>(record_.x, rows, record_.z - 1, column_);
        index_ += static_cast<int32_t>(gridDim.x) / gemm::kClusterCtas;
        read();
        return true;
    }

  private:
    __device__ __forceinline__ void read() {
        if (index_ >= items_.num_items()) return;
        const Item item = items_.item(index_);
        record_ = *reinterpret_cast<const int4*>(work_.table + 4 * (item.tile + 1));
        column_ = item.column;
    }

    const Work& work_;
    ItemOrder items_;
    int32_t index_;
    int4 record_{};
    int32_t column_ = 0;
};

}  // namespace weave::moe_experts
