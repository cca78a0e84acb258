//! The order in which subjects take turns.

/// The order in which `count` subjects take sample number `number`.
///
/// The first one rotates and the direction alternates, so that no subject always follows the same
/// one.
pub(crate) fn turns(number: usize, count: usize) -> impl Iterator<Item = usize> {
    let backwards = number % 2 == 1;
    (0..count).map(move |turn| (number + if backwards { count - turn } else { turn }) % count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_of_subjects_comes_equally_often() {
        for (count, orders) in [(1, 1), (2, 2), (3, 6)] {
            let mut seen: Vec<Vec<usize>> =
                (0..orders).map(|number| turns(number, count).collect()).collect();
            seen.sort();
            seen.dedup();
            assert_eq!(seen.len(), orders);
            assert_eq!(turns(orders, count).collect::<Vec<_>>(), turns(0, count).collect::<Vec<_>>());
        }
    }
}
