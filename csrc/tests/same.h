// Whether two function types can stand for one another at the ABI: as many parameters, each of the
// same size, and pointers where the other has pointers.
#ifndef HOTBUNK_TESTS_SAME_H
#define HOTBUNK_TESTS_SAME_H

#include <type_traits>

template <typename X, typename Y>
constexpr bool alike = sizeof(X) == sizeof(Y) && std::is_pointer_v<X> == std::is_pointer_v<Y>;

template <typename Ours, typename Theirs>
struct Same : std::false_type {};

template <typename R, typename... A, typename S, typename... B>
struct Same<R (*)(A...), S(B...)> {
  static constexpr bool all() {
    if constexpr (sizeof...(A) == sizeof...(B)) return (alike<A, B> && ... && alike<R, S>);
    return false;
  }
  static constexpr bool value = all();
};

#endif  // HOTBUNK_TESTS_SAME_H
