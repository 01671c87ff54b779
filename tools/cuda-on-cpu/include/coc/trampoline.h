// Calls a kernel with arguments given as cuLaunchKernel gets them.
#pragma once
namespace coc {

template <class F, F function> struct Call;

template <class... A, void (*function)(A...)> struct Call<void (*)(A...), function> {
  static constexpr unsigned count = sizeof...(A);
  static constexpr Argument arguments[count + 1] = {{sizeof(A), std::is_pointer_v<A>}..., {0, false}};
  static void call(void** a) { call(a, std::index_sequence_for<A...>{}); }

 private:
  template <size_t... I> static void call(void** a, std::index_sequence<I...>) {
    (void)a;
    function(*static_cast<std::remove_const_t<A>*>(a[I])...);
  }
};

}  // namespace coc
