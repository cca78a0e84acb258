//! Held descriptors, in the order in which they were stored.
use crate::serve::store::text::{Answer, MAX_ANSWER, MAX_FDS, Name};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use thiserror::Error;

/// There is no room for the descriptors of a message.
#[derive(Debug, Error)]
#[error("{more} descriptors do not fit: {held} are held, at most {limit} may be: raise --max-descriptors")]
pub(super) struct Full {
    more: usize,
    held: usize,
    limit: usize,
}

/// At most `limit` descriptors with names.
#[derive(Debug)]
pub(super) struct Table {
    held: Vec<(Name, OwnedFd)>,
    pub(super) limit: usize,
}

impl Table {
    pub(super) fn new(limit: usize) -> Self {
        Self { held: Vec::new(), limit }
    }

    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    /// Holds all descriptors of a message, or none.
    pub(super) fn put(&mut self, name: &Name, fds: Vec<OwnedFd>) -> Result<(), Full> {
        let (more, held, limit) = (fds.len(), self.len(), self.limit);
        if more > limit - held {
            return Err(Full { more, held, limit });
        }
        self.held.extend(fds.into_iter().map(|fd| (name.clone(), fd)));
        Ok(())
    }

    /// Closes the descriptors of a name. Returns their number.
    pub(super) fn remove(&mut self, name: &Name) -> usize {
        let before = self.len();
        self.held.retain(|(held, _)| held != name);
        before - self.len()
    }

    /// As many descriptors from this index on as a message carries.
    pub(super) fn chunk(&self, from: usize) -> (Answer, Vec<BorrowedFd<'_>>) {
        let mut room = MAX_ANSWER;
        let rest = self.held.get(from..).unwrap_or_default();
        let fits = |(name, _): &&(Name, OwnedFd)| {
            let line = "FDNAME=\n".len() + name.as_str().len();
            let fits = line <= room;
            room = room.saturating_sub(line);
            fits
        };
        let chunk: Vec<_> = rest.iter().take(MAX_FDS).take_while(fits).collect();
        if chunk.is_empty() {
            return (Answer::End { total: self.len() }, Vec::new());
        }
        let names = chunk.iter().map(|(name, _)| name.clone()).collect();
        (Answer::Held(names), chunk.iter().map(|(_, fd)| fd.as_fd()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn fds(count: usize) -> Vec<OwnedFd> {
        (0..count).map(|_| std::io::pipe().unwrap().0.into()).collect()
    }

    /// Lengths of all chunks.
    fn chunks(table: &Table) -> Vec<usize> {
        let mut lengths = Vec::new();
        loop {
            let (answer, fds) = table.chunk(lengths.iter().sum());
            assert!(answer.to_string().len() <= MAX_ANSWER);
            match answer {
                Answer::Held(names) => assert_eq!(names.len(), fds.len()),
                other => {
                    assert_eq!((other, fds.len()), (Answer::End { total: table.len() }, 0));
                    return lengths;
                }
            }
            lengths.push(fds.len());
        }
    }

    #[test]
    fn a_full_table_takes_none_of_a_message() {
        let mut table = Table::new(3);
        table.put(&name("a"), fds(2)).unwrap();
        let full = table.put(&name("b"), fds(2)).unwrap_err();
        assert_eq!((full.more, full.held, full.limit, table.len()), (2, 2, 3, 2));
        table.put(&name("b"), fds(1)).unwrap();
        assert_eq!((table.remove(&name("a")), table.remove(&name("a")), table.len()), (2, 0, 1));
    }

    #[test]
    fn chunks_have_bounds() {
        let mut table = Table::new(1000);
        assert_eq!(chunks(&table), [0; 0]);
        table.put(&name("a"), fds(300)).unwrap();
        assert_eq!(chunks(&table), [253, 47]);
        let mut table = Table::new(1000);
        table.put(&name(&"n".repeat(255)), fds(100)).unwrap();
        assert_eq!(chunks(&table), [62, 38]);
        assert_eq!(table.chunk(usize::MAX).0, Answer::End { total: 100 });
    }
}
