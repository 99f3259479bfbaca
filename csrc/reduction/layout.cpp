#include "reduction/layout.h"

namespace weave::gpu {
namespace {

int64_t aligned(int64_t bytes, int64_t alignment) {
    return (bytes + alignment - 1) / alignment * alignment;
}

int64_t out_row_bytes(const RowKind& rows) {
    return aligned(rows.hidden * out_bytes_of(rows.out_kind, rows.dtype), 16) + (rows.row_scales ? kScaleBytes : 0);
}

}  // namespace

OutputLayout output_layout(const RowKind& rows, int64_t tokens) {
    OutputLayout layout{};
    layout.row_bytes = static_cast<int32_t>(rows.hidden * size_of(rows.dtype));
    layout.out_bytes = static_cast<int32_t>(rows.hidden * out_bytes_of(rows.out_kind, rows.dtype));
    layout.out_row_bytes = static_cast<int32_t>(out_row_bytes(rows));
    layout.sum_offset = aligned(tokens * layout.out_row_bytes, kBufferAlignment);
    layout.num_bytes = layout.sum_offset + (rows.sum_whole ? tokens * layout.row_bytes : 0);
    return layout;
}

LLPacketLayout ll_packet_layout(const RowKind& rows, int64_t tokens, int32_t world, bool one_shot) {
    const int64_t slot_rows = one_shot ? tokens : share_of(tokens, world);
    const int64_t row_bytes = rows.hidden * size_of(rows.dtype), num_rows = slot_rows * (world - 1);
    const int64_t out_offset = num_rows * row_bytes;
    const int64_t sum_offset = out_offset + (one_shot ? 0 : num_rows * out_row_bytes(rows));
    return {static_cast<uint32_t>(slot_rows),
            static_cast<uint32_t>(row_bytes),
            static_cast<uint32_t>(out_row_bytes(rows)),
            static_cast<uint32_t>(out_offset),
            static_cast<uint32_t>(sum_offset),
            sum_offset + (one_shot || !rows.sum_whole ? 0 : num_rows * row_bytes)};
}

std::vector<fabric::BufferNeed> buffer_needs(GpuKernel kernel, int64_t tokens, int64_t hidden, DType dtype,
                                             OutKind out_kind, int32_t world) {
    const RowKind rows{hidden, dtype, out_kind, true, true};
    const auto need = [](const char* name, int64_t bytes, bool per_arena) {
        return fabric::BufferNeed{name, aligned(bytes, kBufferAlignment), std::nullopt, per_arena};
    };
    const OutputLayout output = output_layout(rows, tokens);
    switch (kernel) {
        case GpuKernel::kLLPacketOneShot:
        case GpuKernel::kLLPacketTwoShot: {
            const bool one_shot = kernel == GpuKernel::kLLPacketOneShot;
            fabric::BufferNeed mailboxes =
                need("mailboxes", ll_packet_layout(rows, tokens, world, one_shot).num_bytes, true);
            mailboxes.num_bytes *= fabric::kNumMailboxes;
            mailboxes.fill = fabric::kEmptyWord;
            return {mailboxes};
        }
        case GpuKernel::kBulk:
        case GpuKernel::kPosted:
            return {need("staging", staging_bytes(output.row_bytes, share_of(tokens, world), world), true),
                    need("output", output.num_bytes, true)};
        case GpuKernel::kDirect:
            return {need("output", output.num_bytes, true), need("partial", tokens * output.row_bytes, false)};
    }
    return {};
}

}  // namespace weave::gpu
