//! Natural order of names: vm2 before vm10.
use std::cmp::Ordering;

/// Compares runs of digits as numbers, and the rest by character.
pub(crate) fn natural(a: &str, b: &str) -> Ordering {
    let (mut left, mut right) = (a, b);
    loop {
        let ((one, rest_of_one), (other, rest_of_other)) = (run(left), run(right));
        if one.is_empty() || other.is_empty() {
            // End of a name. Leading zeroes break ties.
            return one.len().cmp(&other.len()).then_with(|| a.cmp(b));
        }
        let both_numbers = is_digit(one) && is_digit(other);
        let order = match both_numbers {
            true => {
                let (one, other) = (one.trim_start_matches('0'), other.trim_start_matches('0'));
                one.len().cmp(&other.len()).then_with(|| one.cmp(other))
            }
            false => one.cmp(other),
        };
        if order.is_ne() {
            return order;
        }
        (left, right) = (rest_of_one, rest_of_other);
    }
}

fn is_digit(run: &str) -> bool {
    run.starts_with(|c: char| c.is_ascii_digit())
}

/// Splits off the leading run of digits or of other characters.
fn run(text: &str) -> (&str, &str) {
    let digits = is_digit(text);
    let end = text.find(|c: char| c.is_ascii_digit() != digits).unwrap_or(text.len());
    text.split_at(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_are_counted() {
        let sorted = [
            "7",
            "8a",
            "10",
            "disk",
            "vm",
            "vm01",
            "vm1",
            "vm2",
            "vm2-a",
            "vm2-b2",
            "vm2-b10",
            "vm10",
            "vm10x",
            "vm99999999999999999999998",
            "vm99999999999999999999999",
            "w",
        ];
        let mut names = sorted;
        names.reverse();
        names.sort_by(|a, b| natural(a, b));
        assert_eq!(names, sorted);
        assert_eq!(natural("vm1", "vm1"), Ordering::Equal);
        assert_ne!(natural("vm1", "vm01"), Ordering::Equal);
    }
}
