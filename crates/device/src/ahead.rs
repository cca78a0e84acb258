//! Prefetching along a list.

/// The items of a list, in order; `expect` is called for each, `count` items before its turn.
///
/// What another processor has, or no cache, comes while the items before are worked on. In a list that
/// is worked on in groups, the first of each group would be waited for.
#[inline(always)]
pub(crate) fn ahead<I: Iterator + Clone>(
    list: I,
    count: usize,
    mut expect: impl FnMut(I::Item),
) -> impl Iterator<Item = I::Item> {
    let mut next = list.clone();
    next.by_ref().take(count).for_each(&mut expect);
    list.inspect(move |_| {
        if let Some(item) = next.next() {
            expect(item);
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn each_is_expected_before_its_turn() {
        for (len, count) in [(0, 2), (1, 2), (2, 2), (5, 2), (5, 0), (5, 1)] {
            let log = RefCell::new(Vec::new());
            for item in ahead(0..len, count, |item| log.borrow_mut().push((item, "expected"))) {
                log.borrow_mut().push((item, "turn"));
            }
            let log = log.into_inner();
            let at = |item, what| log.iter().position(|entry| *entry == (item, what)).unwrap();
            assert_eq!(log.len(), 2 * len);
            for item in 0..len {
                assert!(at(item, "expected") < at(item, "turn"));
                let later = item + count + 1;
                assert!(
                    later >= len || at(item, "turn") < at(later, "expected"),
                    "no more than {count} ahead"
                );
            }
        }
    }
}
