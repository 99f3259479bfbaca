// Body of rows_*.cpp. No include guard and no includes: each of those files sets the instruction set with a pragma,
// says what it is (WEAVE_ISA, WEAVE_LANES, WEAVE_ROWS) and then takes this text. (Not by __AVX512F__ and the like: g++
// 12 does not define them after a target pragma.) Everything here has internal linkage and uses no inline function of
// the standard library, so that no wider instruction leaks into code that other files share.
//
// Not used: vcvtneps2bf16. It flushes denormals to zero, which torch does not.

namespace weave {
namespace {

constexpr int kLanes = WEAVE_LANES;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

struct Float32 {
    typedef float Element;
};
struct BFloat16 {
    typedef uint16_t Element;
};
struct Float16 {
    typedef uint16_t Element;
};

inline Floats load(const float* p) {
    Floats x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}

inline void store(float* p, Floats x) {
    __builtin_memcpy(p, &x, sizeof x);
}

#if WEAVE_LANES == 4
inline float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    uint32_t magnitude = half & 0x7fffu;
    union {
        uint32_t word;
        float value;
    } out;
    if (magnitude >= 0x7c00u) {  // infinity, NaN
        out.word = sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13);
    } else if (magnitude >= 0x400u) {
        out.word = sign | ((magnitude << 13) + 0x38000000u);
    } else {  // denormal: value = magnitude * 2^-24
        out.value = static_cast<float>(magnitude) * 0x1p-24f;
        out.word |= sign;
    }
    return out.value;
}

inline uint16_t float_to_half(float value) {
    union {
        float value;
        uint32_t word;
    } in, scaled;
    in.value = value;
    const uint32_t sign = (in.word >> 16) & 0x8000u;
    in.word &= 0x7fffffffu;
    if (in.word > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (in.word >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (in.word < 0x38800000u) {  // denormal half: the adder rounds at bit 2^-24
        scaled.value = in.value + 0.5f;
        return static_cast<uint16_t>(sign | (scaled.word - 0x3f000000u));
    }
    const uint32_t odd = (in.word >> 13) & 1u;
    return static_cast<uint16_t>(sign | ((in.word - 0x38000000u + 0xfffu + odd) >> 13));
}
#endif

template <typename T>
inline Floats load_as(const typename T::Element* p);

template <>
inline Floats load_as<Float32>(const float* p) {
    return load(p);
}

template <>
inline Floats load_as<BFloat16>(const uint16_t* p) {
    Halves h;
    __builtin_memcpy(&h, p, sizeof h);
    return (Floats)(__builtin_convertvector(h, Words) << 16);
}

template <>
inline Floats load_as<Float16>(const uint16_t* p) {
#if WEAVE_LANES == 16
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif WEAVE_LANES == 8
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    Floats x;
    for (int i = 0; i < kLanes; ++i)
        x[i] = half_to_float(p[i]);
    return x;
#endif
}

template <typename T>
inline void store_as(typename T::Element* p, Floats x);

template <>
inline void store_as<Float32>(float* p, Floats x) {
    store(p, x);
}

// Round to nearest, ties to even, NaN to 0x7fc0: as torch does.
template <>
inline void store_as<BFloat16>(uint16_t* p, Floats x) {
    const Words w = (Words)x;
    const Words rounded = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
    const Ints is_nan = x != x;
    const Words kNan = Words{} + 0x7fc0u;
    const Halves h = __builtin_convertvector(is_nan ? kNan : rounded, Halves);
    __builtin_memcpy(p, &h, sizeof h);
}

// Of a value that T holds exactly: nothing is left to round.
template <typename T>
inline void store_exact(typename T::Element* p, Floats x) {
    store_as<T>(p, x);
}

template <>
inline void store_exact<BFloat16>(uint16_t* p, Floats x) {
    const Halves h = __builtin_convertvector((Words)x >> 16, Halves);
    __builtin_memcpy(p, &h, sizeof h);
}

template <>
inline void store_as<Float16>(uint16_t* p, Floats x) {
#if WEAVE_LANES == 16
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif WEAVE_LANES == 8
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < kLanes; ++i)
        p[i] = float_to_half(x[i]);
#endif
}

// The value that x has once stored as T.
template <typename T>
inline Floats rounded(Floats x) {
    typename T::Element elements[kLanes];
    store_as<T>(elements, x);
    return load_as<T>(elements);
}

template <>
inline Floats rounded<Float32>(Floats x) {
    return x;
}

template <>
inline Floats rounded<BFloat16>(Floats x) {
    const Words w = (Words)x;
    const Words kept = (w + 0x7fffu + ((w >> 16) & 1u)) & 0xffff0000u;
    const Ints is_nan = x != x;
    return (Floats)(is_nan ? Words{} + 0x7fc00000u : kept);
}

// A fixed tree, so the result depends on nothing but the lanes.
inline float total(Floats x) {
    float lanes[kLanes];
    store(lanes, x);
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i)
            lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

// Elements [i, hidden) where fewer than kLanes are left: through a buffer whose rest is zero.
template <typename T>
inline Floats load_tail(const typename T::Element* p, int64_t count) {
    typename T::Element elements[kLanes] = {};
    __builtin_memcpy(elements, p, count * sizeof(typename T::Element));
    return load_as<T>(elements);
}

template <typename T>
inline void store_tail(typename T::Element* p, Floats x, int64_t count) {
    typename T::Element elements[kLanes];
    store_as<T>(elements, x);
    __builtin_memcpy(p, elements, count * sizeof(typename T::Element));
}

struct Whole {
    static constexpr bool kTail = false;
};
struct Tail {
    static constexpr bool kTail = true;
};

// body(Whole, i, kLanes) for all whole vectors, then body(Tail, i, rest).
template <typename Body>
inline __attribute__((always_inline)) void for_vectors(int64_t hidden, Body body) {
    int64_t i = 0;
    for (; i + kLanes <= hidden; i += kLanes)
        body(Whole{}, i, static_cast<int64_t>(kLanes));
    if (i < hidden) body(Tail{}, i, hidden - i);
}

template <typename T, bool kTail>
inline Floats load_at(const void* row, int64_t i, int64_t count) {
    const auto* p = static_cast<const typename T::Element*>(row) + i;
    return kTail ? load_tail<T>(p, count) : load_as<T>(p);
}

template <typename T, bool kTail>
inline void store_at(void* row, Floats x, int64_t i, int64_t count) {
    auto* p = static_cast<typename T::Element*>(row) + i;
    if (kTail) {
        store_tail<T>(p, x, count);
    } else {
        store_as<T>(p, x);
    }
}

template <typename T, bool kTail>
inline void store_exact_at(void* row, Floats x, int64_t i, int64_t count) {
    if (kTail) {
        store_at<T, true>(row, x, i, count);
    } else {
        store_exact<T>(static_cast<typename T::Element*>(row) + i, x);
    }
}

inline float inverse_root(float x) {
    return 1.0f / __builtin_sqrtf(x);
}

// Where one token row's partial results are. A local of the loops below: fields of `Rows` would be loaded anew for
// every vector, because the stores between might change them.
struct Partials {
    const void* const* rows;
    int64_t offset_bytes;
    int32_t world;
    const float* total;
    const float* bias;
    float scale;

    Partials(const Rows& call, int64_t row, int64_t row_bytes)
        : rows(call.partials),
          offset_bytes(row * row_bytes),
          world(call.world),
          total(call.total == nullptr ? nullptr : call.total + row * call.hidden),
          bias(call.reduced_bias),
          scale(call.scale) {}
    const char* of(int32_t rank) const { return static_cast<const char*>(rows[rank]) + offset_bytes; }
};

// Sum over ranks in order, bias and scale of one vector. The first two ranks' rows are known outside of the loop.
template <typename T, bool kTail>
inline Floats reduced(const Partials& partials, const char* first, const char* second, int64_t i, int64_t count) {
    Floats x =
        first == nullptr ? load_at<Float32, kTail>(partials.total, i, count) : load_at<T, kTail>(first, i, count);
    if (second != nullptr) x += load_at<T, kTail>(second, i, count);
    for (int32_t rank = 2; rank < partials.world; ++rank)
        x += load_at<T, kTail>(partials.of(rank), i, count);
    if (partials.bias != nullptr) x += load_at<Float32, kTail>(partials.bias, i, count);
    return x * partials.scale;
}

struct Moments {
    float mean = 0;
    float inverse_deviation = 0;
};

// Sum of f(x) over one fp32 row: four sums at a time, because each addition waits for the one before it.
template <typename F>
inline __attribute__((always_inline)) float sum_over(const float* row, int64_t hidden, F f) {
    Floats sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * kLanes <= hidden; i += 4 * kLanes) {
        for (int k = 0; k < 4; ++k)
            sums[k] += f(load(row + i + k * kLanes));
    }
    for (; i + kLanes <= hidden; i += kLanes)
        sums[0] += f(load(row + i));
    float rest = 0;
    if (i < hidden) {
        float values[kLanes];
        store(values, f(load(row + i)));  // past `hidden` is padding
        for (int64_t k = 0; k < hidden - i; ++k)
            rest += values[k];
    }
    return total((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
}

struct Itself {
    Floats operator()(Floats x) const { return x; }
};
struct SquaredDistance {
    float from;
    Floats operator()(Floats x) const { return (x - from) * (x - from); }
};

inline Moments moments(const NormSpec& spec, const float* row, int64_t hidden) {
    Moments out;
    const float count = static_cast<float>(hidden);
    if (spec.kind == NormKind::kLayer) {
        out.mean = sum_over(row, hidden, Itself{}) / count;
    }
    const float squares = sum_over(row, hidden, SquaredDistance{out.mean});
    out.inverse_deviation = inverse_root(squares / count + spec.eps);
    return out;
}

template <typename T, bool kTail>
inline Floats normalized(const Norm& norm, const Moments& moments, Floats x, int64_t i, int64_t count) {
    x = (x - moments.mean) * moments.inverse_deviation;
    if (norm.spec.cast_before_weight) x = rounded<T>(x);
    if (norm.weight != nullptr) x *= load_at<Float32, kTail>(norm.weight, i, count);
    if (norm.bias != nullptr) x += load_at<Float32, kTail>(norm.bias, i, count);
    return x;
}

template <typename T, typename Out>
void store_normalized(const Rows& rows, const float* scratch, int64_t row) {
    const int64_t hidden = rows.hidden;
    const Norm norm = rows.norm;
    char* out =
        static_cast<char*>(rows.normalized) + row * hidden * static_cast<int64_t>(sizeof(typename Out::Element));
    const Moments of_sum = moments(norm.spec, scratch, hidden);
    for_vectors(hidden, [&](auto part, int64_t i, int64_t count) __attribute__((always_inline)) {
        constexpr bool kTail = decltype(part)::kTail;
        store_at<Out, kTail>(out, normalized<T, kTail>(norm, of_sum, load(scratch + i), i, count), i, count);
    });
}

template <typename T>
void reduce_rows(const Rows& rows, int64_t begin, int64_t end, float* scratch) {
    const int64_t hidden = rows.hidden;
    const int64_t row_bytes = hidden * static_cast<int64_t>(sizeof(typename T::Element));
    const Norm post = rows.post;
    const bool has_post = post.spec.kind != NormKind::kNone;
    for (int64_t row = begin; row < end; ++row) {
        const Partials partials(rows, row, row_bytes);
        const char* first = rows.total == nullptr ? partials.of(0) : nullptr;
        const char* second = partials.world > 1 ? partials.of(1) : nullptr;
        const char* residual =
            rows.residual == nullptr ? nullptr : static_cast<const char*>(rows.residual) + row * row_bytes;
        char* sum = rows.sum == nullptr ? nullptr : static_cast<char*>(rows.sum) + row * row_bytes;
        Moments of_post;
        if (has_post) {
            for_vectors(hidden, [&](auto part, int64_t i, int64_t count) __attribute__((always_inline)) {
                constexpr bool kTail = decltype(part)::kTail;
                store_at<Float32, kTail>(scratch, reduced<T, kTail>(partials, first, second, i, count), i, count);
            });
            of_post = moments(post.spec, scratch, hidden);
        }
        for_vectors(hidden, [&](auto part, int64_t i, int64_t count) __attribute__((always_inline)) {
            constexpr bool kTail = decltype(part)::kTail;
            Floats x = has_post ? normalized<T, kTail>(post, of_post, load(scratch + i), i, count)
                                : reduced<T, kTail>(partials, first, second, i, count);
            if (residual != nullptr) x += load_at<T, kTail>(residual, i, count);
            x = rounded<T>(x);
            store_at<Float32, kTail>(scratch, x, i, count);
            if (sum != nullptr) store_exact_at<T, kTail>(sum, x, i, count);
        });
        if (rows.normalized == nullptr) continue;
        if (rows.out_dtype == DType::kFloat32) {
            store_normalized<T, Float32>(rows, scratch, row);
        } else {
            store_normalized<T, T>(rows, scratch, row);
        }
    }
}

void reduce(const Rows& rows, int64_t begin, int64_t end, float* scratch) {
    switch (rows.dtype) {
        case DType::kFloat32:
            return reduce_rows<Float32>(rows, begin, end, scratch);
        case DType::kBFloat16:
            return reduce_rows<BFloat16>(rows, begin, end, scratch);
        case DType::kFloat16:
            return reduce_rows<Float16>(rows, begin, end, scratch);
    }
}

template <typename T>
void widen_row(const void* in, float offset, float* out, int64_t count) {
    for_vectors(count, [&](auto part, int64_t i, int64_t left) __attribute__((always_inline)) {
        constexpr bool kTail = decltype(part)::kTail;
        store_at<Float32, kTail>(out, load_at<T, kTail>(in, i, left) + offset, i, left);
    });
}

void widen(DType dtype, const void* in, float offset, float* out, int64_t count) {
    switch (dtype) {
        case DType::kFloat32:
            return widen_row<Float32>(in, offset, out, count);
        case DType::kBFloat16:
            return widen_row<BFloat16>(in, offset, out, count);
        case DType::kFloat16:
            return widen_row<Float16>(in, offset, out, count);
    }
}

template <typename A, typename B>
void add_rows(const void* a, const void* b, float* out, int64_t count) {
    for_vectors(count, [&](auto part, int64_t i, int64_t left) __attribute__((always_inline)) {
        constexpr bool kTail = decltype(part)::kTail;
        store_at<Float32, kTail>(out, load_at<A, kTail>(a, i, left) + load_at<B, kTail>(b, i, left), i, left);
    });
}

template <typename A>
void add_to(const void* a, DType b_dtype, const void* b, float* out, int64_t count) {
    switch (b_dtype) {
        case DType::kFloat32:
            return add_rows<A, Float32>(a, b, out, count);
        case DType::kBFloat16:
            return add_rows<A, BFloat16>(a, b, out, count);
        case DType::kFloat16:
            return add_rows<A, Float16>(a, b, out, count);
    }
}

void add(DType a_dtype, const void* a, DType b_dtype, const void* b, float* out, int64_t count) {
    switch (a_dtype) {
        case DType::kFloat32:
            return add_to<Float32>(a, b_dtype, b, out, count);
        case DType::kBFloat16:
            return add_to<BFloat16>(a, b_dtype, b, out, count);
        case DType::kFloat16:
            return add_to<Float16>(a, b_dtype, b, out, count);
    }
}

// A value that the compiler does not fuse with the addition after it: sums are then the same with every instruction
// set, and those of torch.
inline Floats on_its_own(Floats x) {
#if WEAVE_LANES == 16
    asm("" : "+v"(x));
#elif defined(__x86_64__)
    asm("" : "+x"(x));
#else
    asm("" : "+w"(x));
#endif
    return x;
}

template <typename T>
void weigh_rows(const void* const* rows, const float* weights, int64_t num_rows, void* out, int64_t count) {
    for_vectors(count, [&](auto part, int64_t i, int64_t left) __attribute__((always_inline)) {
        constexpr bool kTail = decltype(part)::kTail;
        Floats sum = {};
        for (int64_t row = 0; row < num_rows; ++row)
            sum += on_its_own(load_at<T, kTail>(rows[row], i, left) * weights[row]);
        store_at<T, kTail>(out, sum, i, left);
    });
}

void weigh(DType dtype, const void* const* rows, const float* weights, int64_t num_rows, void* out, int64_t count) {
    switch (dtype) {
        case DType::kFloat32:
            return weigh_rows<Float32>(rows, weights, num_rows, out, count);
        case DType::kBFloat16:
            return weigh_rows<BFloat16>(rows, weights, num_rows, out, count);
        case DType::kFloat16:
            return weigh_rows<Float16>(rows, weights, num_rows, out, count);
    }
}

}  // namespace

const RowFunctions WEAVE_ROWS = {WEAVE_ISA, reduce, widen, add, weigh};

}  // namespace weave
